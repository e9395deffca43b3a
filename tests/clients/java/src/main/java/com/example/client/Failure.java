package com.example.client;

import io.grpc.StatusRuntimeException;

/** How a stream failed, and how many tokens it had delivered. */
record Failure(int tokens, StatusRuntimeException error) {
  String status() {
    return error.getStatus().getCode().name();
  }
}
