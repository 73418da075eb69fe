package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.Reconnecting;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

@EnabledIfEnvironmentVariable(named = TestServer.VARIABLE, matches = ".+")
@Timeout(60)
class FlowClientTest {
    private static HeadraceClient client;

    @BeforeAll
    static void connect() {
        client = TestServer.client();
    }

    @AfterAll
    static void disconnect() {
        client.close();
    }

    @Test
    void aSubscriberGetsAsManyEventsAsItAskedFor() throws InterruptedException {
        Probe probe = new Probe();
        client.flow().generate("Once upon a time", TestServer.exactly(30).build()).subscribe(probe);
        assertNull(probe.seen.poll(300, TimeUnit.MILLISECONDS));
        probe.subscription.request(3);
        assertInstanceOf(Accepted.class, probe.take());
        probe.take();
        probe.take();
        assertNull(probe.seen.poll(300, TimeUnit.MILLISECONDS));
        probe.subscription.request(Long.MAX_VALUE);
        probe.subscription.request(Long.MAX_VALUE);
        Object last = probe.untilEnd();
        assertEquals(Probe.COMPLETE, last);
        assertEquals(30, probe.tokens());
    }

    @Test
    void aMessageIsReadOnlyAgainstAnEventAskedFor() throws InterruptedException {
        AtomicInteger asked = new AtomicInteger();
        ManagedChannel channel = Grpc.newChannelBuilder(TestServer.ADDRESS, InsecureChannelCredentials.create())
                .build();
        Transport counted = new Transport(List.of(channel), counting(asked), RetryPolicy.DEFAULT, null);
        try (HeadraceClient counting = new HeadraceClient(counted, new Timeouts(null, null))) {
            Probe slow = new Probe();
            counting.flow()
                    .generate("Once upon a time", TestServer.exactly(100).build())
                    .subscribe(slow);
            slow.subscription.request(1);
            String id = assertInstanceOf(Accepted.class, slow.take()).requestId();
            // The server goes on to the end, while its messages wait in the connection.
            TestServer.untilFinished(client, id);
            assertEquals(1, asked.get());
            slow.subscription.request(2);
            slow.take();
            slow.take();
            assertEquals(3, asked.get());
            slow.subscription.request(Long.MAX_VALUE);
            slow.untilEnd();
            assertEquals(100, slow.tokens());
        }
    }

    /** Adds up how many messages calls ask for. */
    private static ClientInterceptor counting(AtomicInteger asked) {
        return new ClientInterceptor() {
            @Override
            public <Q, R> ClientCall<Q, R> interceptCall(
                    MethodDescriptor<Q, R> method, CallOptions options, Channel next) {
                return new ForwardingClientCall.SimpleForwardingClientCall<>(next.newCall(method, options)) {
                    @Override
                    public void request(int messages) {
                        asked.addAndGet(messages);
                        super.request(messages);
                    }
                };
            }
        };
    }

    @Test
    void cancellingTheSubscriptionCancelsTheCall() throws InterruptedException {
        Probe probe = new Probe();
        client.flow().generate("Once upon a time", TestServer.exactly(400).build()).subscribe(probe);
        probe.subscription.request(1);
        String id = assertInstanceOf(Accepted.class, probe.take()).requestId();
        probe.subscription.cancel();
        assertEquals(
                List.of(FinishReason.CANCELLED),
                TestServer.untilFinished(client, id).finishReasons());
        assertNull(probe.seen.poll(100, TimeUnit.MILLISECONDS));
    }

    @Test
    void aRequestForNothingIsAnError() throws InterruptedException {
        Probe probe = new Probe();
        client.flow().generate("Once", TestServer.exactly(400).build()).subscribe(probe);
        probe.subscription.request(0);
        assertInstanceOf(IllegalArgumentException.class, probe.take());
        assertThrows(
                NullPointerException.class,
                () -> client.flow().generate("Once", GenerationOptions.defaults()).subscribe(null));
    }

    @Test
    void eachSubscriberHasACallOfItsOwnAndRefusalsAreItsErrors() throws InterruptedException {
        Flow.Publisher<GenerationEvent> refused = client.flow()
                .chat(Conversation.of("hello"), GenerationOptions.builder().n(9999).build());
        for (int i = 0; i < 2; i++) {
            Probe probe = new Probe();
            refused.subscribe(probe);
            assertInstanceOf(InvalidRequestException.class, probe.take());
        }
    }

    @Test
    void aSubscriberThatThrowsEndsItsStream() throws InterruptedException {
        Probe probe = new Probe() {
            @Override
            public void onNext(GenerationEvent event) {
                throw new IllegalStateException("full");
            }
        };
        client.flow().generate("Once", TestServer.exactly(400).build()).subscribe(probe);
        probe.subscription.request(1);
        assertInstanceOf(IllegalStateException.class, probe.take());
    }

    @Test
    void aSubscriptionReconnectsUnderBackPressure() throws InterruptedException {
        String id = client.submit("Once upon a time", TestServer.exactly(400).build()).requestId();
        Probe probe = new Probe();
        try (HeadraceClient proxied = TestServer.proxied(1)) {
            proxied.flow().subscribe(id, 0).subscribe(probe);
            probe.subscription.request(10);
            for (int i = 0; i < 10; i++) {
                probe.take();
            }
            TestServer.cut();
            Object next;
            do {
                probe.subscription.request(1);
                next = probe.take();
            } while (!(next instanceof Reconnecting));
            // It is connected again, and still sends nothing that was not asked for.
            assertNull(probe.seen.poll(500, TimeUnit.MILLISECONDS));
            probe.subscription.request(Long.MAX_VALUE);
            assertEquals(Probe.COMPLETE, probe.untilEnd());
            assertEquals(400, probe.tokens());
        }
    }

    @Test
    void futuresCompleteWithAnswersAndFailures() {
        AsyncHeadraceClient async = client.async();
        List<GenerationEvent> events = new ArrayList<>();
        GenerationOptions options = TestServer.exactly(10).build();
        CompletableFuture<Completion> streamed = async.generate(Prompt.text("Once upon a time"), options, events::add);
        CompletableFuture<Completion> whole = async.complete(Prompt.text("Once upon a time"), options);
        assertEquals(whole.join().text(), streamed.join().text());
        assertInstanceOf(Done.class, events.get(events.size() - 1));
        String id = async.submit(Prompt.text("Once"), options, null).join().requestId();
        assertEquals(10, async.subscribe(id, 0, event -> {}).join().tokenIds().size());
        assertTrue(async.load("").join().serving());
        assertEquals(1, async.listModels().join().size());
        assertEquals(1, async.listRequests(RequestFilter.ALL.pageSize(1), "").join().requests().size());
        CompletionException failed =
                assertThrows(CompletionException.class, () -> async.getModel("no-such-model").join());
        assertInstanceOf(NotFoundException.class, failed.getCause());
    }

    @Test
    void cancellingAFutureCancelsItsCall() throws InterruptedException {
        BlockingQueue<String> ids = new LinkedBlockingQueue<>();
        CompletableFuture<Completion> answer = client.async()
                .generate(Prompt.text("Once upon a time"), TestServer.exactly(400).build(), event -> {
                    if (event instanceof Accepted accepted) {
                        ids.add(accepted.requestId());
                    }
                });
        String id = ids.take();
        answer.cancel(true);
        assertThrows(CancellationException.class, answer::join);
        assertEquals(
                List.of(FinishReason.CANCELLED),
                TestServer.untilFinished(client, id).finishReasons());
    }

    /** Takes notes. */
    private static class Probe implements Flow.Subscriber<GenerationEvent> {
        static final String COMPLETE = "complete";

        final BlockingQueue<Object> seen = new LinkedBlockingQueue<>();
        private final List<Object> taken = new ArrayList<>();
        Flow.Subscription subscription;

        Object take() throws InterruptedException {
            Object next = seen.poll(30, TimeUnit.SECONDS);
            taken.add(next);
            return next;
        }

        Object untilEnd() throws InterruptedException {
            Object next = take();
            while (next instanceof GenerationEvent) {
                next = take();
            }
            return next;
        }

        int tokens() {
            int count = 0;
            for (Object each : taken) {
                if (each instanceof Delta delta) {
                    assertEquals(count, delta.firstTokenIndex());
                    count += delta.tokenIds().size();
                }
            }
            return count;
        }

        @Override
        public void onSubscribe(Flow.Subscription given) {
            subscription = given;
        }

        @Override
        public void onNext(GenerationEvent event) {
            seen.add(event);
        }

        @Override
        public void onError(Throwable failure) {
            seen.add(failure);
        }

        @Override
        public void onComplete() {
            seen.add(COMPLETE);
        }
    }
}
