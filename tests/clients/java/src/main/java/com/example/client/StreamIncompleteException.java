package com.example.client;

/** The stream broke a rule of inference.proto, so what was received is not the answer. */
final class StreamIncompleteException extends Exception {
  private static final long serialVersionUID = 1;

  StreamIncompleteException(String message) {
    super(message);
  }
}
