package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.OutputFinished;
import io.github.headrace.GenerationEvent.Reconnecting;
import io.github.headrace.GenerationEvent.Started;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** What happens when connections are cut on the way to a real server. */
@EnabledIfEnvironmentVariable(named = TestServer.VARIABLE, matches = ".+")
@Timeout(60)
class ReconnectTest {
    // Long enough to be still running when the last cut comes, on a busy machine too.
    private static final int TOKENS = 300;

    @ParameterizedTest
    @ValueSource(ints = {1, 3})
    void aSubscriptionSurvivesCutsWithoutALostOrDoubledToken(int outputs) {
        GenerationOptions options = TestServer.exactly(TOKENS).temperature(1).seed(7).n(outputs).logprobs(1).build();
        try (HeadraceClient direct = TestServer.client();
                HeadraceClient client = TestServer.proxied(1)) {
            String id = direct.submit("Once upon a time", options).requestId();
            List<GenerationEvent> events = readWithCuts(client.subscribe(id), List.of(2, 40, 90));
            assertEquals(3, count(events, Reconnecting.class));
            assertEquals(1, count(events, Accepted.class));
            assertEquals(1, count(events, Started.class));
            assertEquals(outputs, count(events, OutputFinished.class));
            assertEquals(1, count(events, Done.class));
            Completion whole = direct.subscribe(id).result();
            for (Output output : whole.outputs()) {
                check(output, deltas(events, output.outputIndex()));
            }
            // What was read again was not computed again.
            assertEquals(TOKENS * outputs, whole.usage().outputTokens());
        }
    }

    @Test
    void oneOutputContinuesFromItsOwnToken() {
        GenerationOptions options = TestServer.exactly(TOKENS).n(2).build();
        try (HeadraceClient direct = TestServer.client();
                HeadraceClient client = TestServer.proxied(2)) {
            String id = direct.submit("Once upon a time", options).requestId();
            waitForToken(direct.subscribe(id), 1, 5);
            List<GenerationEvent> events = readWithCuts(client.subscribe(id, 5, 1), List.of(10, 30));
            List<Integer> read = deltas(events, 1).stream()
                    .flatMap(delta -> delta.tokenIds().stream())
                    .toList();
            assertEquals(direct.subscribe(id).result().outputs().get(1).tokenIds().subList(5, TOKENS), read);
            assertTrue(deltas(events, 0).isEmpty());
        }
    }

    @Test
    void aGenerationIsNotStartedAgain() {
        try (HeadraceClient client = TestServer.proxied(1);
                GenerationStream stream =
                        client.generate("Once upon a time", TestServer.exactly(400).build())) {
            stream.next();
            TestServer.cut();
            UnavailableException broken = assertThrows(UnavailableException.class, stream::result);
            assertEquals(stream.requestId(), broken.requestId());
        }
    }

    @Test
    void callsThatMayBeSentTwiceSurviveCuts() {
        try (HeadraceClient client = TestServer.proxied(1)) {
            for (int i = 0; i < 5; i++) {
                client.tokenize("Once upon a time");
                client.submit("Once", TestServer.exactly(1).build());
                TestServer.cut();
            }
        }
    }

    @Test
    void channelsAreConnectionsTakenInTurn() {
        TestServer.cut();
        try (HeadraceClient client = TestServer.proxied(3)) {
            for (int i = 0; i < 9; i++) {
                client.load();
            }
            assertEquals(3, TestServer.cut());
        }
    }

    @Test
    void noServerIsUnavailableInTheEnd() {
        RetryPolicy twice = new RetryPolicy(2, TestServer.FAST.initialBackoff(), TestServer.FAST.maxBackoff(), 1);
        try (HeadraceClient client =
                HeadraceClient.builder("127.0.0.1:1").retry(twice).build()) {
            assertThrows(UnavailableException.class, client::load);
            GenerationStream stream = client.subscribe("any");
            assertTrue(stream.next() instanceof Reconnecting);
            assertThrows(UnavailableException.class, stream::next);
        }
    }

    @Test
    void closingWhileItWaitsToReconnectEndsTheStream() {
        RetryPolicy slow = new RetryPolicy(5, java.time.Duration.ofMinutes(5), java.time.Duration.ofMinutes(5), 1);
        try (HeadraceClient client =
                        HeadraceClient.builder("127.0.0.1:1").retry(slow).build();
                GenerationStream stream = client.subscribe("any")) {
            assertTrue(stream.next() instanceof Reconnecting);
            new Thread(stream::close).start();
            assertEquals(false, stream.hasNext());
        }
    }

    /** A subscription may begin at a token only once it is there. */
    private static void waitForToken(GenerationStream stream, int outputIndex, int token) {
        try (stream) {
            while (!(stream.next() instanceof Delta delta
                    && delta.outputIndex() == outputIndex
                    && delta.firstTokenIndex() >= token)) {
                assertTrue(stream.hasNext());
            }
        }
    }

    private static List<GenerationEvent> readWithCuts(GenerationStream stream, List<Integer> cutsAt) {
        List<GenerationEvent> events = new ArrayList<>();
        List<Integer> cuts = new ArrayList<>(cutsAt);
        try (stream) {
            while (stream.hasNext()) {
                events.add(stream.next());
                if (!cuts.isEmpty() && events.size() >= cuts.get(0)) {
                    cuts.remove(0);
                    TestServer.cut();
                    skipToReconnecting(stream, events);
                }
            }
        }
        return events;
    }

    /** What was on its way when the connection was cut still comes. */
    private static void skipToReconnecting(GenerationStream stream, List<GenerationEvent> events) {
        do {
            assertTrue(stream.hasNext(), "the stream was cut too late to break");
            events.add(stream.next());
        } while (!(events.get(events.size() - 1) instanceof Reconnecting));
    }

    private static void check(Output output, List<Delta> deltas) {
        int next = 0;
        List<Integer> ids = new ArrayList<>();
        List<Float> logprobs = new ArrayList<>();
        StringBuilder text = new StringBuilder();
        for (Delta delta : deltas) {
            assertEquals(next, delta.firstTokenIndex());
            next += delta.tokenIds().size();
            ids.addAll(delta.tokenIds());
            logprobs.addAll(delta.logprobs().orElseThrow().sampled());
            text.append(delta.text());
        }
        assertEquals(output.tokenIds(), ids);
        assertEquals(output.text(), text.toString());
        assertEquals(output.logprobs().orElseThrow().sampled(), logprobs);
    }

    private static List<Delta> deltas(List<GenerationEvent> events, int outputIndex) {
        return events.stream()
                .flatMap(event -> event instanceof Delta delta ? Stream.of(delta) : Stream.empty())
                .filter(delta -> delta.outputIndex() == outputIndex)
                .toList();
    }

    private static long count(List<GenerationEvent> events, Class<?> kind) {
        return events.stream().filter(kind::isInstance).count();
    }
}
