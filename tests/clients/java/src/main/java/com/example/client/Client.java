package com.example.client;

import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.Context.CancellableContext;
import io.grpc.Deadline;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.stream.Stream;
import unbroken.v1.Delta;
import unbroken.v1.GenerateRequest;
import unbroken.v1.GenerateResponse;
import unbroken.v1.InferenceGrpc;
import unbroken.v1.InferenceGrpc.InferenceBlockingStub;
import unbroken.v1.Sampling;
import unbroken.v1.Stop;

/**
 * A gRPC client that needs nothing but the published proto file: {@code java -jar target/client.jar HOST:PORT
 * [HOST:PORT]}.
 *
 * <p>{@code mvn package} generates the stubs from the folder in its property {@code proto}, and builds the jar.
 *
 * <p>It prints a line of JSON for each step. With the addresses of two frontends, it only loses the first one: see
 * {@link KeptAnswer}.
 */
public final class Client {
  private static final String MODEL = "mocker";
  private static final String FULL_MODEL = "full"; // The only worker of this model runs one request at a time.
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

  /** Runs each step once. */
  public static void main(String[] args) throws Exception {
    List<ManagedChannel> channels =
        Stream.of(args)
            .map(address -> Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build())
            .toList();
    try {
      List<InferenceBlockingStub> stubs = channels.stream().map(InferenceGrpc::newBlockingStub).toList();
      if (stubs.size() > 1) {
        lostFrontend(stubs);
        return;
      }
      Client client = new Client(stubs.get(0));
      client.stream();
      client.cancel();
      client.refusal();
      client.deadline();
      client.lostWorker();
    } finally {
      for (ManagedChannel channel : channels) {
        channel.shutdownNow().awaitTermination(CLOSE_S, TimeUnit.SECONDS);
      }
    }
  }

  private void stream() throws StreamIncompleteException {
    report("stream", readAnswer(generate(request("stream", MODEL, TOKENS)), () -> {}).fields());
  }

  /** Cancels the rpc after some tokens. The worker stops within two steps. */
  private void cancel() throws Exception {
    try (CancellableContext context = Context.current().withCancellation()) {
      Failure failure =
          context.call(
              () ->
                  readFailure(
                      generate(request("cancel", MODEL, ENDLESS)),
                      answer -> {
                        if (answer.tokenIds().size() >= ENOUGH) {
                          context.cancel(null);
                        }
                      }));
      report("cancel", Map.of("tokens", failure.tokens(), "status", failure.status()));
    }
  }

  /** Sends a request while another stream holds the only slot. The refusal says why, and when to retry. */
  private void refusal() throws Exception {
    try (CancellableContext holder = Context.current().withCancellation()) {
      holder.call(() -> generate(request("holder", FULL_MODEL, ENDLESS)).next());
      Failure refused = readFailure(generate(request("refusal", FULL_MODEL, TOKENS)), answer -> {});
      report("refusal", details(refused.error()));
    } // Closing the context cancels the rpc that was started in it.
  }

  /** Requests more tokens than the deadline allows. */
  private void deadline() throws Exception {
    InferenceBlockingStub hurried = stub.withDeadlineAfter(SHORT_DEADLINE_S, TimeUnit.SECONDS);
    Failure failure = readFailure(hurried.generate(request("deadline", MODEL, ENDLESS)), answer -> {});
    Map<String, Object> fields = details(failure.error());
    fields.put("tokens", failure.tokens());
    report("deadline", fields);
  }

  /**
   * Loses its worker: the test that runs this program kills the worker when it reads {@code begun}. The client needs no
   * code for that.
   */
  private void lostWorker() throws StreamIncompleteException {
    Runnable begun = () -> report("begun", Map.of());
    report("lost_worker", readAnswer(generate(request("lost_worker", MODEL, TOKENS)), begun).fields());
  }

  /** Loses its frontend: the test that runs this program kills the first one when it reads {@code begun}. */
  private static void lostFrontend(List<InferenceBlockingStub> stubs) throws StreamIncompleteException {
    GenerateRequest request = request("lost_frontend", MODEL, TOKENS);
    Deadline deadline = Deadline.after(DEADLINE_S, TimeUnit.SECONDS);
    List<InferenceBlockingStub> others = stubs.subList(1, stubs.size());
    report("undisturbed", readAnswer(new KeptAnswer(others, request, deadline), () -> {}).fields());
    Runnable begun = () -> report("begun", Map.of());
    report("resumed", readAnswer(new KeptAnswer(stubs, request, deadline), begun).fields());
  }

  private Iterator<GenerateResponse> generate(GenerateRequest request) {
    return stub.withDeadlineAfter(DEADLINE_S, TimeUnit.SECONDS).generate(request);
  }

  /** Returns a request. The name becomes its request id, which the logs show. */
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
   * Passes each delta of a stream with one choice to {@code take}.
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
        throw new StreamIncompleteException("an item must be either a delta or the final marker");
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

  /** Reads a stream to its end and returns the answer. Runs {@code begun} once ENOUGH tokens have arrived. */
  private static Answer readAnswer(Iterator<GenerateResponse> responses, Runnable begun) throws StreamIncompleteException {
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

  /** Reads a stream that must fail. Calls {@code seen} with the answer so far after each delta. */
  private static Failure readFailure(Iterator<GenerateResponse> responses, Consumer<Answer> seen)
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
      return new Failure(answer.tokenIds().size(), error);
    }
    throw new IllegalStateException("the stream ended without an error");
  }

  /**
   * Returns a status and its details: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo if the server knows when to
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

  /** Prints the result of a step. */
  private static void report(String step, Map<String, ?> fields) {
    Map<String, Object> line = new HashMap<>(fields);
    line.put("step", step);
    System.out.println(new Gson().toJson(line));
  }
}
