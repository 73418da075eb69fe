package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.headrace.GenerationEvent.Reconnecting;
import io.github.headrace.v1.Accepted;
import io.github.headrace.v1.CompleteRequest;
import io.github.headrace.v1.CompleteResponse;
import io.github.headrace.v1.Delta;
import io.github.headrace.v1.Done;
import io.github.headrace.v1.GenerateRequest;
import io.github.headrace.v1.GenerateResponse;
import io.github.headrace.v1.GetLoadRequest;
import io.github.headrace.v1.GetLoadResponse;
import io.github.headrace.v1.InferenceServiceGrpc;
import io.github.headrace.v1.SubmitRequest;
import io.github.headrace.v1.SubmitResponse;
import io.github.headrace.v1.SubscribeRequest;
import io.github.headrace.v1.SubscribeResponse;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What is sent how often, as a server sees it that fails at first. */
@Timeout(60)
class RetryTest {
    private static final RetryPolicy FAST =
            new RetryPolicy(10, Duration.ofMillis(5), Duration.ofMillis(20), 2);

    private final Flaky service = new Flaky();
    private Server server;
    private HeadraceClient client;

    @BeforeEach
    void start() throws IOException {
        server = Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
                .addService(service)
                .intercept(service.new Notes())
                .build()
                .start();
        client = client(FAST);
    }

    @AfterEach
    void stop() {
        client.close();
        server.shutdownNow();
    }

    private HeadraceClient client(RetryPolicy policy) {
        return HeadraceClient.builder("127.0.0.1:" + server.getPort())
                .apiKey("hr-key")
                .metadata("x-team", "search")
                .retry(policy)
                .build();
    }

    @Test
    void callsThatMayBeSentTwiceAre() {
        service.failures = 2;
        assertTrue(client.load().serving());
        assertEquals(List.of("GetLoad", "GetLoad", "GetLoad"), service.calls);
    }

    @Test
    void submitIsSentAgainWithTheSameKey() {
        service.failures = 2;
        client.submit("hello", GenerationOptions.defaults());
        assertEquals(3, service.keys.size());
        assertEquals(1, service.keys.stream().distinct().count());
        client.submit("hello", GenerationOptions.defaults());
        assertEquals(2, service.keys.stream().distinct().count());
        assertTrue(service.keys.stream().noneMatch(String::isEmpty));
    }

    @Test
    void callsThatGenerateAreSentOnce() {
        service.failures = 1;
        assertThrows(UnavailableException.class, () -> client.complete("x", GenerationOptions.defaults()));
        service.failures = 2;
        try (GenerationStream stream = client.generate("x")) {
            assertThrows(UnavailableException.class, stream::result);
        }
        assertEquals(List.of("Complete", "Generate"), service.calls);
    }

    @Test
    void otherFailuresAndOtherPoliciesAreNotTriedAgain() {
        service.failures = 1;
        service.status = Status.RESOURCE_EXHAUSTED;
        assertThrows(OverloadedException.class, client::load);
        service.failures = 2;
        service.status = Status.UNAVAILABLE;
        try (HeadraceClient once = client(RetryPolicy.NONE)) {
            assertThrows(UnavailableException.class, once::load);
        }
        assertEquals(2, service.calls.size());
    }

    @Test
    void everyAttemptCarriesTheHeadersAndTheDeadline() {
        service.failures = 1;
        client.withTimeout(Duration.ofSeconds(20)).load();
        assertEquals(2, service.headers.size());
        for (Metadata headers : service.headers) {
            assertEquals("Bearer hr-key", header(headers, "authorization"));
            assertEquals("search", header(headers, "x-team"));
        }
        assertEquals(2, service.deadlines);
    }

    @Test
    void aBrokenSubscriptionAsksForTheNextToken() {
        service.breaks = true;
        List<GenerationEvent> events = new CopyOnWriteArrayList<>();
        client.subscribe("req-1", 3, 0).forEachRemaining(events::add);
        assertEquals(List.of(3, 5), service.fromTokens);
        assertInstanceOf(Reconnecting.class, events.get(2));
        assertEquals(1, events.stream().filter(Reconnecting.class::isInstance).count());
        assertInstanceOf(GenerationEvent.Done.class, events.get(events.size() - 1));
    }

    private static String header(Metadata headers, String name) {
        return headers.get(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER));
    }

    /** Fails the first calls, and notes all. */
    private static final class Flaky extends InferenceServiceGrpc.InferenceServiceImplBase {
        final List<String> calls = new CopyOnWriteArrayList<>();
        final List<String> keys = new CopyOnWriteArrayList<>();
        final List<Integer> fromTokens = new CopyOnWriteArrayList<>();
        final List<Metadata> headers = new CopyOnWriteArrayList<>();
        volatile int deadlines;
        volatile int failures;
        volatile boolean breaks;
        volatile Status status = Status.UNAVAILABLE;

        final class Notes implements ServerInterceptor {
            @Override
            public <Q, R> ServerCall.Listener<Q> interceptCall(
                    ServerCall<Q, R> call, Metadata metadata, ServerCallHandler<Q, R> next) {
                calls.add(call.getMethodDescriptor().getBareMethodName());
                headers.add(metadata);
                if (io.grpc.Context.current().getDeadline() != null) {
                    deadlines++;
                }
                return next.startCall(call, metadata);
            }
        }

        private <R> void answer(StreamObserver<R> observer, R response) {
            if (calls.size() <= failures) {
                observer.onError(status.withDescription("restarting").asRuntimeException());
                return;
            }
            observer.onNext(response);
            observer.onCompleted();
        }

        @Override
        public void getLoad(GetLoadRequest request, StreamObserver<GetLoadResponse> observer) {
            answer(observer, GetLoadResponse.newBuilder().setServing(true).build());
        }

        @Override
        public void submit(SubmitRequest request, StreamObserver<SubmitResponse> observer) {
            keys.add(request.getIdempotencyKey());
            answer(observer, SubmitResponse.newBuilder().setRequestId("req-1").build());
        }

        @Override
        public void complete(CompleteRequest request, StreamObserver<CompleteResponse> observer) {
            answer(observer, CompleteResponse.getDefaultInstance());
        }

        @Override
        public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
            answer(observer, GenerateResponse.getDefaultInstance());
        }

        @Override
        public void subscribe(SubscribeRequest request, StreamObserver<SubscribeResponse> observer) {
            fromTokens.add(request.getFromToken());
            send(observer, event().setAccepted(Accepted.newBuilder().setRequestId("req-1")));
            int first = request.getFromToken();
            Delta.Builder two = Delta.newBuilder().setFirstTokenIndex(first).addTokenIds(1).addTokenIds(2);
            send(observer, event().setDelta(two));
            if (breaks) {
                breaks = false;
                observer.onError(Status.UNAVAILABLE.asRuntimeException());
                return;
            }
            send(observer, event().setDone(Done.getDefaultInstance()));
            observer.onCompleted();
        }

        private static io.github.headrace.v1.GenerationEvent.Builder event() {
            return io.github.headrace.v1.GenerationEvent.newBuilder();
        }

        private static void send(
                StreamObserver<SubscribeResponse> observer, io.github.headrace.v1.GenerationEvent.Builder event) {
            observer.onNext(SubscribeResponse.newBuilder().setEvent(event).build());
        }
    }
}
