package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.PromptLogprobs;
import io.github.headrace.v1.Accepted;
import io.github.headrace.v1.Content;
import io.github.headrace.v1.Done;
import io.github.headrace.v1.OutputFinished;
import io.github.headrace.v1.Started;
import io.github.headrace.v1.SubscribeRequest;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;
import java.util.stream.IntStream;

/**
 * A log that breaks anywhere and is cut into deltas differently each time gives every token once.
 */
class SubscriptionStateTest {
    private static final int TOKENS = 12;
    private static final RetryPolicy PATIENT = new RetryPolicy(100, Duration.ofMillis(1), Duration.ofMillis(1), 1);

    static IntStream seeds() {
        return IntStream.range(0, 300);
    }

    @ParameterizedTest
    @MethodSource("seeds")
    void nothingIsLostOrDoubled(int seed) {
        Random random = new Random(seed);
        int outputs = 1 + random.nextInt(3);
        int first = random.nextInt(TOKENS + 1);
        Integer only = random.nextBoolean() ? Integer.valueOf(random.nextInt(outputs)) : null;
        SubscriptionState state = state(first, only, PATIENT);
        List<GenerationEvent> events = new ArrayList<>();
        for (int attempt = 0; !state.done(); attempt++) {
            SubscribeRequest request = (SubscribeRequest) state.call().request();
            List<io.github.headrace.v1.GenerationEvent> log = log(request, outputs, random);
            int breaks = attempt < 4 ? random.nextInt(log.size() + 1) : log.size();
            log.subList(0, breaks).stream().map(state::take).filter(e -> e != null).forEach(events::add);
            if (!state.done()) {
                state.failed(Failure.of(Status.Code.UNAVAILABLE, "cut", null));
            }
        }
        for (int output = 0; output < outputs; output++) {
            check(events, output, only == null || only == output ? first : TOKENS);
        }
        List<Integer> prompt = new ArrayList<>();
        events.forEach(event -> {
            if (event instanceof PromptLogprobs part) {
                assertEquals(prompt.size() + 1, part.firstTokenIndex());
                part.logprobs().ranks().forEach(prompt::add);
            }
        });
        assertEquals(IntStream.range(1, 7).boxed().toList(), prompt);
        assertEquals(only == null ? outputs : 1, count(events, GenerationEvent.OutputFinished.class));
        assertEquals(1, count(events, GenerationEvent.Accepted.class));
        assertEquals(1, count(events, GenerationEvent.Started.class));
    }

    @Test
    void aGapIsTheServersFault() {
        SubscriptionState state = state(0, null, PATIENT);
        state.take(delta(0, 0, 2));
        assertThrows(InternalException.class, () -> state.take(delta(0, 3, 1)));
    }

    @Test
    void whatIsFinalIsThrown() {
        HeadraceException refused = Failure.of(Status.Code.NOT_FOUND, "gone", null);
        assertThrows(NotFoundException.class, () -> state(0, null, PATIENT).failed(refused));
        HeadraceException cut = Failure.of(Status.Code.UNAVAILABLE, "cut", null);
        assertThrows(UnavailableException.class, () -> state(0, null, RetryPolicy.NONE).failed(cut));
        SubscriptionState twice = state(0, null, new RetryPolicy(3, Duration.ofMillis(1), Duration.ofMillis(1), 1));
        assertEquals(1, twice.failed(cut).attempt());
        assertEquals(2, twice.failed(cut).attempt());
        assertThrows(UnavailableException.class, () -> twice.failed(cut));
        assertThrows(InternalException.class, () -> state(0, null, PATIENT).ended());
    }

    @Test
    void pausesGrowToTheirBoundAndHeedTheServer() {
        RetryPolicy policy = new RetryPolicy(9, Duration.ofMillis(100), Duration.ofSeconds(1), 3);
        assertEquals(Duration.ofMillis(100), policy.backoff(1));
        assertEquals(Duration.ofMillis(300), policy.backoff(2));
        assertEquals(Duration.ofSeconds(1), policy.backoff(5));
        com.google.rpc.Status asked = com.google.rpc.Status.newBuilder()
                .setCode(14)
                .addDetails(com.google.protobuf.Any.pack(com.google.rpc.RetryInfo.newBuilder()
                        .setRetryDelay(com.google.protobuf.Duration.newBuilder().setSeconds(7))
                        .build()))
                .build();
        Duration delay = state(0, null, policy).failed(Failure.of(asked, null)).delay();
        assertTrue(delay.compareTo(Duration.ofSeconds(7)) >= 0);
    }

    private static SubscriptionState state(int first, Integer only, RetryPolicy policy) {
        return new SubscriptionState(Calls.subscribe("req", first, only), null, policy);
    }

    private static void check(List<GenerationEvent> events, int output, int first) {
        List<Integer> ids = new ArrayList<>();
        StringBuilder text = new StringBuilder();
        for (GenerationEvent event : events) {
            if (event instanceof Delta delta && delta.outputIndex() == output) {
                assertEquals(first + ids.size(), delta.firstTokenIndex());
                ids.addAll(delta.tokenIds());
                text.append(delta.text());
            }
        }
        assertEquals(IntStream.range(first, TOKENS).map(i -> token(output, i)).boxed().toList(), ids);
        StringBuilder expected = new StringBuilder();
        IntStream.range(first, TOKENS).forEach(i -> expected.append(word(output, i)));
        assertEquals(expected.toString(), text.toString());
    }

    private static List<io.github.headrace.v1.GenerationEvent> log(
            SubscribeRequest request, int outputs, Random random) {
        List<io.github.headrace.v1.GenerationEvent> log = new ArrayList<>();
        log.add(event().setAccepted(Accepted.newBuilder().setRequestId("req")).build());
        log.add(event().setStarted(Started.getDefaultInstance()).build());
        for (int at = 1; at < 7; ) {
            int count = Math.min(1 + random.nextInt(4), 7 - at);
            log.add(prompt(at, count));
            at += count;
        }
        int[] next = new int[outputs];
        List<Integer> open = new ArrayList<>();
        for (int output = 0; output < outputs; output++) {
            next[output] = request.getFromToken();
            if (!request.hasOutputIndex() || request.getOutputIndex() == output) {
                open.add(output);
            }
        }
        while (!open.isEmpty()) {
            int output = open.get(random.nextInt(open.size()));
            int count = Math.min(1 + random.nextInt(3), TOKENS - next[output]);
            if (count > 0) {
                log.add(delta(output, next[output], count));
                next[output] += count;
            }
            if (next[output] == TOKENS) {
                open.remove((Integer) output);
                log.add(event().setOutputFinished(OutputFinished.newBuilder().setOutputIndex(output)).build());
            }
        }
        log.add(event().setDone(Done.getDefaultInstance()).build());
        return log;
    }

    private static io.github.headrace.v1.GenerationEvent.Builder event() {
        return io.github.headrace.v1.GenerationEvent.newBuilder();
    }

    private static io.github.headrace.v1.GenerationEvent prompt(int first, int count) {
        io.github.headrace.v1.PromptLogprobs.Builder part =
                io.github.headrace.v1.PromptLogprobs.newBuilder().setFirstTokenIndex(first);
        for (int i = first; i < first + count; i++) {
            part.getLogprobsBuilder().addSampled(-i).addRanks(i).addTopCounts(0);
        }
        return event().setPromptLogprobs(part).build();
    }

    private static io.github.headrace.v1.GenerationEvent delta(int output, int first, int count) {
        io.github.headrace.v1.Delta.Builder delta = io.github.headrace.v1.Delta.newBuilder()
                .setOutputIndex(output)
                .setFirstTokenIndex(first);
        for (int i = first; i < first + count; i++) {
            delta.addTokenIds(token(output, i));
            delta.addContent(Content.newBuilder().setText(word(output, i)));
        }
        return event().setDelta(delta).build();
    }

    private static int token(int output, int index) {
        return 1000 * output + index;
    }

    private static String word(int output, int index) {
        return index % 3 == 2 ? "" : "w" + output + "." + index + " ";
    }

    private static long count(List<GenerationEvent> events, Class<?> kind) {
        return events.stream().filter(kind::isInstance).count();
    }
}
