package com.example.client;

import io.grpc.StatusRuntimeException;

/** How a stream ended that did not end with OK, and how many tokens came before. */
record Broken(int tokens, StatusRuntimeException error) {
  String status() {
    return error.getStatus().getCode().name();
  }
}
