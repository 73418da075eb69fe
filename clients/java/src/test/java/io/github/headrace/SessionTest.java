package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.OutputFinished;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

@EnabledIfEnvironmentVariable(named = TestServer.VARIABLE, matches = ".+")
@Timeout(60)
class SessionTest {
    private static final GenerationOptions OPTIONS = TestServer.exactly(16).build();
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
    void generationsAreReadFromTheirOwnThreads() {
        List<String> prompts = List.of("Once upon a time", "The capital of France is", "2 + 2 =");
        try (Session session = client.session()) {
            List<SessionGeneration> generations =
                    prompts.stream().map(prompt -> session.submit(prompt, OPTIONS)).toList();
            List<CompletableFuture<Completion>> answers = generations.stream()
                    .map(generation -> CompletableFuture.supplyAsync(generation::result))
                    .toList();
            for (int i = 0; i < prompts.size(); i++) {
                assertEquals(client.complete(prompts.get(i), OPTIONS).text(), answers.get(i).join().text());
            }
        }
    }

    @Test
    void eventsComeForAllUntilTheSessionIsFinished() {
        Map<Integer, Integer> tokens = new HashMap<>();
        int done = 0;
        try (Session session = client.session()) {
            IntStream.range(0, 5).forEach(i -> session.submit("Number " + i, OPTIONS));
            session.submit(Conversation.of("hello"), OPTIONS);
            session.finish();
            for (SessionEvent event : session.events()) {
                if (event.event() instanceof Delta delta) {
                    int seen = tokens.merge(event.streamId(), delta.tokenIds().size(), Integer::sum);
                    assertEquals(seen, delta.firstTokenIndex() + delta.tokenIds().size());
                } else if (event.event() instanceof Done) {
                    done++;
                }
            }
            assertThrows(IllegalStateException.class, () -> session.submit("late", OPTIONS));
        }
        assertEquals(6, done);
        assertEquals(List.of(16, 16, 16, 16, 16, 16), List.copyOf(tokens.values()));
    }

    @Test
    void stepsAreColumnsOfEqualLength() {
        int tokens = 0;
        StringBuilder text = new StringBuilder();
        try (Session session = client.session()) {
            session.submit("Once upon a time", OPTIONS);
            session.finish();
            for (SessionStep step : session.steps()) {
                tokens += step.tokenIds().size();
                step.texts().forEach(text::append);
                assertEquals(step.streamIds().size(), step.tokenIds().size());
                assertEquals(step.streamIds().size(), step.outputIndices().size());
                assertEquals(step.streamIds().size(), step.texts().size());
            }
            assertThrows(IllegalStateException.class, session::events);
        }
        assertEquals(16, tokens);
        assertEquals(client.complete("Once upon a time", OPTIONS).text(), text.toString());
    }

    @Test
    void aRefusedGenerationFailsAloneAndACancelledOneEnds() {
        try (Session session = client.session()) {
            SessionGeneration refused =
                    session.submit("x", GenerationOptions.builder().topP(7).build());
            SessionGeneration cancelled =
                    session.submit("Once upon a time", TestServer.exactly(400).build());
            SessionGeneration good = session.submit("Once upon a time", OPTIONS);
            InvalidRequestException failure = assertThrows(InvalidRequestException.class, refused::result);
            assertEquals("spec.sampling.top_p", failure.violations().get(0).field());
            cancelled.next();
            cancelled.cancel();
            assertEquals(FinishReason.CANCELLED, cancelled.result().finishReason());
            assertEquals(16, good.result().tokenIds().size());
        }
    }

    @Test
    void whatIsDetachedOutlivesTheSessionAndIsAttachedInAnother() {
        String id;
        GenerationOptions options = TestServer.exactly(100).build();
        try (Session session = client.session()) {
            SessionGeneration detached = session.submitDetached(Prompt.text("Once upon a time"), options, null);
            detached.next();
            id = detached.requestId().orElseThrow();
        }
        Completion whole = client.subscribe(id).result();
        try (Session session = client.session()) {
            SessionGeneration rest = session.attach(id, 40);
            assertEquals(whole.tokenIds().subList(40, 100), rest.result().tokenIds());
            SessionGeneration one = session.attach(id, 99, 0);
            assertEquals(whole.tokenIds().subList(99, 100), one.result().tokenIds());
            SessionGeneration left = session.attach(id, 0);
            left.detach();
            assertFalse(left.hasNext());
        }
    }

    @Test
    void closingASessionCancelsWhatWasSubmitted() throws InterruptedException {
        String id;
        try (Session session = client.session()) {
            SessionGeneration generation =
                    session.submit("Once upon a time", TestServer.exactly(400).build());
            generation.next();
            id = generation.requestId().orElseThrow();
        }
        assertEquals(
                List.of(FinishReason.CANCELLED),
                TestServer.untilFinished(client, id).finishReasons());
    }

    @Test
    void aBrokenConnectionEndsASession() {
        try (HeadraceClient proxied = TestServer.proxied(1);
                Session session = proxied.session()) {
            SessionGeneration generation =
                    session.submit("Once upon a time", TestServer.exactly(400).build());
            generation.next();
            TestServer.cut();
            assertThrows(UnavailableException.class, generation::result);
            assertThrows(UnavailableException.class, () -> session.submit("more", OPTIONS));
        }
    }

    @Test
    void outputsOfOneGenerationAreToldApart() {
        try (Session session = client.session()) {
            SessionGeneration two = session.submit(
                    "Once", TestServer.exactly(8).temperature(1).seed(3).n(2).logprobs(1).build());
            Completion answer = two.result();
            assertEquals(2, answer.outputs().size());
            assertTrue(answer.outputs().stream().allMatch(output -> output.tokenIds().size() == 8));
            assertEquals(8, answer.logprobs().orElseThrow().sampled().size());
            assertInstanceOf(OutputFinished.class, lastButOne(session.submit("Once", OPTIONS)));
        }
    }

    private static GenerationEvent lastButOne(SessionGeneration generation) {
        GenerationEvent before = null;
        GenerationEvent last = null;
        for (GenerationEvent event : generation) {
            before = last;
            last = event;
        }
        return before;
    }
}
