package com.example.client;

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import unbroken.v1.GenerateRequest;
import unbroken.v1.GenerateResponse;
import unbroken.v1.InferenceGrpc.InferenceBlockingStub;
import unbroken.v1.ResumeRequest;

/**
 * The items of an answer that outlives its connection and its frontend, each once: copy this file. The rules are those of
 * "Coming back over gRPC" in docs/clients.md.
 */
final class KeptAnswer implements Iterator<GenerateResponse> {
  private static final int FAILURES_MAX = 10; // So many attempts in a row may fail without an item.
  private static final long PAUSE_MS = 100;
  private static final long PAUSE_MS_MAX = 5_000;
  private static final Metadata KEPT = new Metadata();

  static {
    KEPT.put(Metadata.Key.of("x-on-disconnect", Metadata.ASCII_STRING_MARSHALLER), "continue");
  }

  private final List<InferenceBlockingStub> stubs;
  private final GenerateRequest request;
  private final Deadline deadline;
  private Iterator<GenerateResponse> items;
  private String cursor = "";
  private boolean isBegun;
  private boolean isComplete;
  private int index; // Of the stub of the current attempt.
  private int failures;

  /**
   * Prepares a request, which gets a request id of its own.
   *
   * @param stubs of several frontends, of which the first one is asked first
   */
  KeptAnswer(List<InferenceBlockingStub> stubs, GenerateRequest request, Deadline deadline) {
    this.stubs = stubs;
    this.request = request.toBuilder().setRequestId(UUID.randomUUID().toString()).build();
    this.deadline = deadline;
  }

  /**
   * Waits for the next item.
   *
   * @throws StatusRuntimeException if the answer has failed
   */
  @Override
  public boolean hasNext() {
    while (true) {
      try {
        if (items == null) {
          items = begin();
        }
        return items.hasNext();
      } catch (StatusRuntimeException error) {
        if (isComplete) {
          return false;
        }
        lose(error);
      }
    }
  }

  @Override
  public GenerateResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    GenerateResponse item = items.next();
    failures = 0;
    isComplete = item.getCompleteFinal();
    cursor = item.getCursor().isEmpty() ? cursor : item.getCursor();
    return item;
  }

  private Iterator<GenerateResponse> begin() {
    InferenceBlockingStub stub = stubs.get(index % stubs.size()).withDeadline(deadline);
    if (isBegun) {
      return stub.resume(ResumeRequest.newBuilder().setGenerationId(request.getRequestId()).setCursor(cursor).build());
    }
    return stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(KEPT)).generate(request);
  }

  /** Prepares the next attempt after a failure, and pauses. Throws the failure if there is none. */
  private void lose(StatusRuntimeException error) {
    boolean isUnknown = isBegun && cursor.isEmpty() && error.getStatus().getCode() == Status.Code.NOT_FOUND;
    if (failures == FAILURES_MAX || !(isUnknown || isBroken(error))) {
      throw error;
    }
    failures += 1;
    items = null;
    isBegun = !isUnknown;
    if (isUnknown) {
      return; // No frontend has begun with it: ask this one anew.
    }
    index += 1;
    int more = failures - stubs.size();
    if (more < 0) {
      return;
    }
    long pauseMs = ThreadLocalRandom.current().nextLong(Math.min(PAUSE_MS_MAX, PAUSE_MS << more) + 1);
    long leftMs = Math.max(0, deadline.timeRemaining(TimeUnit.MILLISECONDS));
    try {
      Thread.sleep(Math.min(Math.max(pauseMs, retryAfterMs(error)), leftMs));
    } catch (InterruptedException interrupt) {
      Thread.currentThread().interrupt();
      throw error;
    }
  }

  /** Whether to come back after this failure. Without ErrorInfo, the connection has broken, or a proxy has answered. */
  private static boolean isBroken(StatusRuntimeException error) {
    ErrorInfo info = detail(error, ErrorInfo.class);
    if (info != null) {
      return info.getMetadataOrDefault("retryable", "").equals("true");
    }
    Status.Code code = error.getStatus().getCode();
    return code != Status.Code.DEADLINE_EXCEEDED && code != Status.Code.CANCELLED;
  }

  private static long retryAfterMs(StatusRuntimeException error) {
    RetryInfo retry = detail(error, RetryInfo.class);
    if (retry == null) {
      return 0;
    }
    Duration delay = retry.getRetryDelay();
    return TimeUnit.SECONDS.toMillis(delay.getSeconds()) + TimeUnit.NANOSECONDS.toMillis(delay.getNanos());
  }

  /** Returns the detail of this type, or null. */
  private static <T extends Message> T detail(StatusRuntimeException error, Class<T> type) {
    for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(type)) {
        try {
          return detail.unpack(type);
        } catch (InvalidProtocolBufferException malformed) {
          throw error;
        }
      }
    }
    return null;
  }
}
