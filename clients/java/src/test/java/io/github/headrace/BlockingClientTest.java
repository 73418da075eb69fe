package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.OutputFinished;
import io.github.headrace.GenerationEvent.PromptLogprobs;
import io.github.headrace.GenerationEvent.Started;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.StreamSupport;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

@EnabledIfEnvironmentVariable(named = TestServer.VARIABLE, matches = ".+")
@Timeout(60)
class BlockingClientTest {
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
    void aStreamHasItsEventsInOrderAndEveryTokenOnce() {
        List<GenerationEvent> events = new ArrayList<>();
        Completion answer;
        try (GenerationStream stream = client.generate("Once upon a time", TestServer.exactly(20).build())) {
            stream.forEachRemaining(events::add);
            answer = stream.result();
        }
        assertInstanceOf(Accepted.class, events.get(0));
        assertInstanceOf(Started.class, events.get(1));
        assertInstanceOf(OutputFinished.class, events.get(events.size() - 2));
        assertInstanceOf(Done.class, events.get(events.size() - 1));
        int next = 0;
        StringBuilder text = new StringBuilder();
        for (GenerationEvent event : events.subList(2, events.size() - 2)) {
            Delta delta = assertInstanceOf(Delta.class, event);
            assertEquals(next, delta.firstTokenIndex());
            next += delta.tokenIds().size();
            text.append(delta.text());
        }
        assertEquals(20, next);
        assertEquals(text.toString(), answer.text());
        assertEquals(FinishReason.LENGTH, answer.finishReason());
        assertEquals(20, answer.usage().outputTokens());
        assertFalse(answer.ledger().endToEnd().isZero());
    }

    @Test
    void aWholeAnswerIsWhatTheStreamSays() {
        GenerationOptions options = TestServer.exactly(12).logprobs(2).n(2).build();
        Completion whole = client.complete("The capital of France is", options);
        try (GenerationStream stream = client.generate("The capital of France is", options)) {
            Completion streamed = stream.result();
            assertEquals(2, whole.outputs().size());
            for (int i = 0; i < 2; i++) {
                assertEquals(whole.outputs().get(i).text(), streamed.outputs().get(i).text());
                assertEquals(whole.outputs().get(i).tokenIds(), streamed.outputs().get(i).tokenIds());
            }
            Logprobs logprobs = streamed.logprobs().orElseThrow();
            assertEquals(12, logprobs.sampled().size());
            // Greedy: the sampled token is the most likely one.
            assertEquals(streamed.tokenIds().get(5), logprobs.top(5).keySet().iterator().next());
        }
    }

    @Test
    void textComesInPiecesAndRefusesToMixOutputs() {
        try (GenerationStream stream = client.generate("Once upon a time", TestServer.exactly(8).build())) {
            assertEquals(
                    client.complete("Once upon a time", TestServer.exactly(8).build()).text(),
                    String.join("", stream.text()));
        }
        try (GenerationStream two =
                client.generate("Once", TestServer.exactly(8).n(2).build())) {
            assertThrows(IllegalStateException.class, () -> two.text().forEach(piece -> {}));
        }
    }

    @Test
    void aPromptOfTokensIsThePromptOfTheirText() {
        List<Integer> ids = client.tokenize("Once upon a time");
        GenerationOptions options = TestServer.exactly(6).build();
        assertEquals(
                client.complete("Once upon a time", options).tokenIds(),
                client.complete(Prompt.tokens(ids), options).tokenIds());
        assertEquals("Once upon a time", client.detokenize(ids));
    }

    @Test
    void promptLogprobsCoverThePrompt() {
        List<Integer> ids = client.tokenize("Once upon a time there was");
        GenerationOptions options = TestServer.exactly(2).promptLogprobs(1).build();
        try (GenerationStream stream = client.generate("Once upon a time there was", options)) {
            int next = 1;
            Completion answer = null;
            for (GenerationEvent event : stream) {
                if (event instanceof PromptLogprobs part) {
                    assertEquals(next, part.firstTokenIndex());
                    next += part.logprobs().sampled().size();
                }
            }
            answer = stream.result();
            assertEquals(ids.size(), next);
            assertEquals(ids.size() - 1, answer.promptLogprobs().orElseThrow().sampled().size());
        }
    }

    @Test
    void aConversationIsAnsweredAndContinued() {
        GenerationOptions options = TestServer.exactly(8).build();
        List<ChatMessage> messages =
                List.of(ChatMessage.system("You are brief."), ChatMessage.user("What is a KV cache?"));
        try (GenerationStream stream = client.chat(messages, options)) {
            assertEquals(8, stream.result().tokenIds().size());
        }
        Conversation begun =
                new Conversation(List.of(ChatMessage.user("Count."), ChatMessage.assistant("one, two,")), true);
        try (GenerationStream stream = client.chat(begun, options)) {
            assertEquals(8, stream.result().tokenIds().size());
        }
    }

    @Test
    void aSubmittedGenerationIsReadFromAnyTokenAndStartedOncePerKey() {
        GenerationOptions options = TestServer.exactly(24).build();
        String key = "java-test-" + System.nanoTime();
        Submitted first = client.submit(Prompt.text("Once upon a time"), options, key);
        Submitted again = client.submit(Prompt.text("Once upon a time"), options, key);
        assertEquals(first.requestId(), again.requestId());
        assertFalse(first.existing());
        assertTrue(again.existing());
        assertThrows(
                AlreadyExistsException.class, () -> client.submit(Prompt.text("Something else"), options, key));
        Completion whole = client.subscribe(first.requestId()).result();
        try (GenerationStream rest = client.subscribe(first.requestId(), 10);
                GenerationStream output = client.subscribe(first.requestId(), 20, 0)) {
            assertEquals(whole.tokenIds().subList(10, 24), rest.result().tokenIds());
            assertEquals(whole.tokenIds().subList(20, 24), output.result().tokenIds());
        }
    }

    @Test
    void requestsAreListedPageByPage() {
        for (int i = 0; i < 3; i++) {
            client.submit("Once", TestServer.exactly(1).build());
        }
        RequestFilter filter = RequestFilter.ALL.pageSize(2);
        List<String> paged = ids(client.listRequests(filter));
        assertTrue(paged.size() >= 3);
        assertEquals(paged.size(), paged.stream().distinct().count());
        // Others may have come in the meantime, none may have been left out.
        assertTrue(ids(client.listRequests()).containsAll(paged));
    }

    @Test
    void closingAStreamCancelsItsGeneration() throws InterruptedException {
        String id;
        try (GenerationStream stream =
                client.generate("Once upon a time", TestServer.exactly(400).build())) {
            stream.next();
            id = stream.requestId().orElseThrow();
        }
        assertEquals(List.of(FinishReason.CANCELLED), TestServer.untilFinished(client, id).finishReasons());
    }

    @Test
    void cancelEndsAGenerationAndItsReadersSeeIt() {
        String id = client.submit("Once upon a time", TestServer.exactly(400).build())
                .requestId();
        assertTrue(client.cancel(id));
        assertFalse(client.cancel(id));
        try (GenerationStream stream = client.subscribe(id)) {
            assertEquals(FinishReason.CANCELLED, stream.result().finishReason());
        }
    }

    @Test
    void timeoutsAreDeadlinesAndTimeLimitsAreResults() {
        HeadraceClient impatient = client.withTimeout(Duration.ofMillis(100));
        try (GenerationStream stream =
                impatient.generate("Once upon a time", TestServer.exactly(400).build())) {
            assertThrows(DeadlineExceededException.class, stream::result);
            // What failed stays failed: nobody takes half an answer for a whole one.
            assertThrows(DeadlineExceededException.class, stream::result);
        }
        GenerationOptions limited =
                TestServer.exactly(400).timeLimit(Duration.ofMillis(100)).build();
        assertEquals(
                FinishReason.DEADLINE,
                client.complete("Once upon a time", limited).finishReason());
    }

    @Test
    void aRefusalNamesFieldAndRule() {
        GenerationOptions options = GenerationOptions.builder().topP(7).build();
        InvalidRequestException refused =
                assertThrows(InvalidRequestException.class, () -> client.complete("x", options));
        assertEquals(Status.Code.INVALID_ARGUMENT, refused.code());
        assertEquals("spec.sampling.top_p", refused.violations().get(0).field());
        assertTrue(refused.getMessage().contains("top_p"), refused.getMessage());
        try (GenerationStream stream = client.generate("x", options)) {
            assertThrows(InvalidRequestException.class, stream::hasNext);
        }
        GenerationOptions beams = GenerationOptions.builder().beamSearch(2, 1.0).temperature(0.5).build();
        InvalidRequestException hot =
                assertThrows(InvalidRequestException.class, () -> client.complete("x", beams));
        assertEquals("spec.sampling.temperature", hot.violations().get(0).field());
        Completion found = client.complete(
                "x", GenerationOptions.builder().beamSearch(3, 1.0).n(2).maxTokens(4).build());
        assertTrue(found.outputs().get(0).score().get() >= found.outputs().get(1).score().get());
        GenerationOptions regex = GenerationOptions.builder().regex("[").build();
        assertThrows(InvalidRequestException.class, () -> client.complete("x", regex));
        assertThrows(NotFoundException.class, () -> client.getModel("no-such-model"));
        assertThrows(NotFoundException.class, () -> client.cancel("no-such-request"));
    }

    @Test
    void anInterruptEndsTheReading() throws InterruptedException {
        Thread reader = Thread.currentThread();
        try (GenerationStream stream =
                client.generate("Once upon a time", TestServer.exactly(400).build())) {
            Thread interrupter = new Thread(reader::interrupt);
            stream.next();
            interrupter.start();
            assertThrows(CancelledException.class, stream::result);
            assertTrue(Thread.interrupted());
            interrupter.join();
        }
    }

    @Test
    void modelsAndLoadAreTold() {
        Model model = client.getModel();
        assertEquals(List.of(model.name()), client.listModels().stream().map(Model::name).toList());
        assertTrue(model.maxContextTokens() > 0 && model.hasChatTemplate());
        Load load = client.load();
        assertTrue(load.serving());
        assertEquals(model.name(), load.model());
    }

    @Test
    void aClosedClientSaysSo() {
        HeadraceClient other = TestServer.client();
        GenerationStream stream =
                other.subscribe(other.submit("Once", TestServer.exactly(400).build()).requestId());
        stream.next();
        String id = stream.requestId().orElseThrow();
        other.close();
        CancelledException closed = assertThrows(CancelledException.class, stream::result);
        assertTrue(closed.getMessage().contains("closed"), closed.getMessage());
        assertThrows(CancelledException.class, other::load);
        // A subscription is only detached.
        assertTrue(client.cancel(id));
    }

    private static List<String> ids(Iterable<RequestSummary> rows) {
        return StreamSupport.stream(rows.spliterator(), false)
                .map(RequestSummary::requestId)
                .toList();
    }
}
