package com.example.client;

import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.Context.CancellableContext;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import unbroken.v1.Delta;
import unbroken.v1.GenerateRequest;
import unbroken.v1.GenerateResponse;
import unbroken.v1.InferenceGrpc;
import unbroken.v1.InferenceGrpc.InferenceBlockingStub;
import unbroken.v1.Sampling;
import unbroken.v1.Stop;

/**
 * A client made of nothing but the published proto file: {@code java -jar target/client.jar HOST:PORT}.
 *
 * <p>{@code mvn package} generates the stubs from the folder that its property {@code proto} names, and makes the jar.
 *
 * <p>It prints a line of JSON for each thing that it tries.
 */
public final class Client {
  private static final String MODEL = "mocker";
  private static final String FULL_MODEL = "full"; // Its only worker takes one request at a time.
  private static final int TOKENS = 120;
  private static final int ENDLESS = 100_000;
  private static final int ENOUGH = 5;
  private static final long DEADLINE_S = 60;
  private static final long SHORT_DEADLINE_S = 2;
  private static final long CLOSE_S = 5;

  private final InferenceBlockingStub stub;

  private Client(InferenceBlockingStub stub) {
    this.stub = stub;
  }

  /** Tries everything once. */
  public static void main(String[] args) throws Exception {
    ManagedChannel channel = Grpc.newChannelBuilder(args[0], InsecureChannelCredentials.create()).build();
    try {
      Client client = new Client(InferenceGrpc.newBlockingStub(channel));
      client.stream();
      client.cancel();
      client.refusal();
      client.deadline();
      client.lostWorker();
    } finally {
      channel.shutdownNow().awaitTermination(CLOSE_S, TimeUnit.SECONDS);
    }
  }

  private void stream() throws StreamIncompleteException {
    tell("stream", whole(generate(request("stream", MODEL, TOKENS)), () -> {}).fields());
  }

  /** Leaves after some tokens; the worker stops within two steps. */
  private void cancel() throws Exception {
    try (CancellableContext context = Context.current().withCancellation()) {
      Broken broken =
          context.call(
              () ->
                  broken(
                      generate(request("cancel", MODEL, ENDLESS)),
                      answer -> {
                        if (answer.tokenIds().size() >= ENOUGH) {
                          context.cancel(null);
                        }
                      }));
      tell("cancel", Map.of("tokens", broken.tokens(), "status", broken.status()));
    }
  }

  /** While one stream has all the room there is, another is refused: why, and when to come back. */
  private void refusal() throws Exception {
    try (CancellableContext holder = Context.current().withCancellation()) {
      holder.call(() -> generate(request("holder", FULL_MODEL, ENDLESS)).next());
      Broken refused = broken(generate(request("refusal", FULL_MODEL, TOKENS)), answer -> {});
      tell("refusal", details(refused.error()));
    } // Closing the context cancels what was started in it.
  }

  /** Asks more than there is time for. */
  private void deadline() throws Exception {
    InferenceBlockingStub hurried = stub.withDeadlineAfter(SHORT_DEADLINE_S, TimeUnit.SECONDS);
    Broken broken = broken(hurried.generate(request("deadline", MODEL, ENDLESS)), answer -> {});
    Map<String, Object> fields = details(broken.error());
    fields.put("tokens", broken.tokens());
    tell("deadline", fields);
  }

  /** Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it. */
  private void lostWorker() throws StreamIncompleteException {
    Runnable begun = () -> tell("begun", Map.of());
    tell("lost_worker", whole(generate(request("lost_worker", MODEL, TOKENS)), begun).fields());
  }

  private Iterator<GenerateResponse> generate(GenerateRequest request) {
    return stub.withDeadlineAfter(DEADLINE_S, TimeUnit.SECONDS).generate(request);
  }

  /** A request; the name is for the logs. */
  private static GenerateRequest request(String name, String model, int maxTokens) {
    return GenerateRequest.newBuilder()
        .setModel(model)
        .setText("The moon")
        .setSampling(Sampling.newBuilder().setTemperature(0.8f).setSeed(7))
        .setStop(Stop.newBuilder().setMaxTokens(maxTokens).setIgnoreEos(true))
        .setRequestId("java-" + name)
        .build();
  }

  /**
   * Gives each delta of a stream with one choice to {@code take}.
   *
   * @throws StreamIncompleteException if the stream breaks a rule
   * @throws StatusRuntimeException if its status is not OK
   */
  private static void read(Iterator<GenerateResponse> responses, Consumer<Delta> take)
      throws StreamIncompleteException {
    int position = 0;
    boolean isComplete = false;
    while (responses.hasNext()) {
      GenerateResponse response = responses.next();
      if (isComplete || response.hasDelta() == response.getCompleteFinal()) {
        throw new StreamIncompleteException("an item is either a delta or the last");
      }
      isComplete = response.getCompleteFinal();
      if (isComplete) {
        continue;
      }
      Delta delta = response.getDelta();
      if (delta.getTokenIdsCount() > 0 && delta.getPosition() != position) {
        throw new StreamIncompleteException("position " + delta.getPosition() + " follows " + position);
      }
      position += delta.getTokenIdsCount();
      take.accept(delta);
    }
    if (!isComplete) {
      throw new StreamIncompleteException("the stream was cut off");
    }
  }

  /** The answer of a stream; {@code begun} runs once ENOUGH tokens of it are there. */
  private static Answer whole(Iterator<GenerateResponse> responses, Runnable begun) throws StreamIncompleteException {
    Answer answer = new Answer();
    read(
        responses,
        delta -> {
          int had = answer.tokenIds().size();
          answer.add(delta);
          if (had < ENOUGH && answer.tokenIds().size() >= ENOUGH) {
            begun.run();
          }
        });
    return answer;
  }

  /** Reads a stream that is not to end well, calling {@code seen} with all there is after each delta. */
  private static Broken broken(Iterator<GenerateResponse> responses, Consumer<Answer> seen)
      throws StreamIncompleteException {
    Answer answer = new Answer();
    try {
      read(
          responses,
          delta -> {
            answer.add(delta);
            seen.accept(answer);
          });
    } catch (StatusRuntimeException error) {
      return new Broken(answer.tokenIds().size(), error);
    }
    throw new IllegalStateException("the stream ended well");
  }

  /**
   * A status and what it carries: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo where it is known when to
   * retry.
   */
  private static Map<String, Object> details(StatusRuntimeException error) throws InvalidProtocolBufferException {
    Map<String, Object> found = new HashMap<>();
    found.put("status", error.getStatus().getCode().name());
    for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        ErrorInfo info = detail.unpack(ErrorInfo.class);
        found.put("reason", info.getReason());
        found.put("domain", info.getDomain());
        found.put("metadata", info.getMetadataMap());
      } else if (detail.is(RetryInfo.class)) {
        Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
        found.put("retry_after_s", delay.getSeconds() + delay.getNanos() / 1e9);
      }
    }
    return found;
  }

  /** Prints what came of a step. */
  private static void tell(String step, Map<String, ?> fields) {
    Map<String, Object> line = new HashMap<>(fields);
    line.put("step", step);
    System.out.println(new Gson().toJson(line));
  }
}
