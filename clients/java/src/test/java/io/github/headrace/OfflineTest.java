package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.grpc.LoadBalancerRegistry;
import io.grpc.Metadata;
import io.grpc.Status;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.temporal.ChronoUnit;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** What needs no server: options, refusals of this client's own, addresses and keys. */
class OfflineTest {

    @Test
    void everyFieldOfTheSpecHasAnOption() {
        GenerationOptions all = GenerationOptions.builder()
                .model("m").temperature(0.5).topP(0.5).topK(5).minP(0.1).topNSigma(1.5).repetitionPenalty(1.1)
                .presencePenalty(0.1).frequencyPenalty(0.1).seed(-1L).logitBias(Map.of(3, 1.5))
                .stop("a", "b").stopTokenIds(List.of(1)).maxTokens(9).minTokens(1).ignoreEos(true)
                .badWords(List.of("x")).includeStopString(true).n(2)
                .logprobs(0).promptLogprobs(0).priority(-3).timeLimit(Duration.ofMillis(1500)).cacheSalt("s")
                .skipSpecialTokens(false).tokenIdsOnly(true).traceDetail(TraceDetail.SPAN).jsonSchema("{}").maxDrafts(4)
                .maxReasoningTokens(5).reasoningEffort(ReasoningEffort.HIGH)
                .beamSearch(2, 1.0, EarlyStopping.NEVER).bestOf(2).build();
        assertEquals(Set.of("text", "token_ids"), unset(all.spec()));
        for (GenerationOptions form : List.of(
                GenerationOptions.builder().jsonObject().build(),
                GenerationOptions.builder().choice(List.of("a", "b")).build(),
                GenerationOptions.builder().structuralTag("a", "ab", "{}", "c").build())) {
            assertEquals(Set.of(), unset(form.spec().getStructuredOutput()));
        }
        assertEquals(2, all.spec().getStop().getStringsCount());
        assertEquals(500_000_000, all.spec().getTimeLimit().getNanos());
        assertEquals(all, all.toBuilder().build());
        assertEquals(GenerationOptions.defaults().spec().getSerializedSize(), 0);
    }

    /** Fields that are not set, but for other members of a oneof that is. */
    private static Set<String> unset(Message message) {
        Set<String> names = new TreeSet<>();
        for (FieldDescriptor field : message.getDescriptorForType().getFields()) {
            boolean set = field.isRepeated() ? message.getRepeatedFieldCount(field) > 0 : message.hasField(field);
            boolean other = field.getRealContainingOneof() != null && message.hasOneof(field.getRealContainingOneof());
            if (!set && !other) {
                names.add(field.getName());
            } else if (set && !field.isRepeated() && field.getJavaType() == FieldDescriptor.JavaType.MESSAGE
                    && !field.getMessageType().getFullName().startsWith("google.")) {
                names.addAll(unset((Message) message.getField(field)));
            }
        }
        return names;
    }

    @Test
    void whatTheWireCannotCarryIsRefusedByField() {
        GenerationOptions.Builder options = GenerationOptions.builder();
        assertEquals("spec.stop.max_tokens", field(() -> options.maxTokens(-1)));
        assertEquals("spec.cache_salt", field(() -> options.cacheSalt("\ud800")));
        assertEquals("spec.cache_salt", field(() -> options.cacheSalt("a\udc00b")));
        options.cacheSalt("whole: \ud83d\ude00");
        Prompt negative = Prompt.tokens(List.of(-5));
        assertEquals("spec.token_ids.ids", field(() -> Calls.generate(negative, GenerationOptions.defaults())));
        assertEquals("from_token", field(() -> Calls.subscribe("x", -1, null)));
        Conversation half = Conversation.of("\ud800");
        assertEquals("messages[0].parts[0].text", field(() -> Calls.chat(half, GenerationOptions.defaults())));
    }

    private static String field(Runnable call) {
        return assertThrows(InvalidRequestException.class, call::run).violations().get(0).field();
    }

    @ParameterizedTest
    @ValueSource(strings = {"127.0.0.1:50051", "127.9.9.9", "localhost:1", "LOCALHOST", "[::1]:5", "::1",
        "unix:/run/x", "dns:///localhost:5", "dns:127.0.0.1:4"})
    void thisMachineIsKnown(String target) {
        assertTrue(Target.isLocal(target));
    }

    @ParameterizedTest
    @ValueSource(strings = {"10.0.0.1:50051", "localhost.example.com:1", "127.0.0.1.example.com:1", "[2001:db8::1]:5",
        "dns:///example.com", "0.0.0.0:1", "999.0.0.1:1", "[::]:4", "", "127.example.com"})
    void otherMachinesAreToo(String target) {
        assertEquals(false, Target.isLocal(target));
    }

    @Test
    void aKeyNeverCrossesANetworkInTheClear() {
        HeadraceClientBuilder far = HeadraceClient.builder("far.example.com:50051").apiKey("secret-key").plaintext();
        IllegalArgumentException refused = assertThrows(IllegalArgumentException.class, far::build);
        assertTrue(!refused.getMessage().contains("secret-key"), "the key is not told");
        far.allowPlaintextKey().build().close();
        far.tls(Tls.systemRoots()).build().close();
        HeadraceClient.builder("far.example.com:50051").apiKey("secret").build().close();
        HeadraceClient.builder("127.0.0.1:50051").apiKey("secret").build().close();
        HeadraceClientBuilder both = HeadraceClient.builder("localhost:1").apiKey("k").metadata("authorization", "x");
        assertThrows(IllegalArgumentException.class, both::build);
        assertThrows(IllegalArgumentException.class, () -> HeadraceClient.builder("x").apiKey("with newline\n"));
    }

    @Test
    void settingsThatMakeNoSenseAreRefused() {
        HeadraceClientBuilder builder = HeadraceClient.builder("localhost:1");
        assertThrows(IllegalArgumentException.class, () -> builder.channels(0));
        assertThrows(IllegalArgumentException.class, () -> builder.channels(65));
        LoadBalancerRegistry empty = new LoadBalancerRegistry();
        LoadBalancing weighted = LoadBalancing.WEIGHTED_ROUND_ROBIN;
        IllegalArgumentException lacking = assertThrows(IllegalArgumentException.class, () -> weighted.check(empty));
        assertTrue(lacking.getMessage().contains("grpc-xds"), lacking.getMessage());
        builder.tls(Tls.authorities(Path.of("no-such-file.pem")));
        IllegalArgumentException missing = assertThrows(IllegalArgumentException.class, builder::build);
        assertTrue(missing.getMessage().contains("no-such-file.pem"), missing.getMessage());
        Duration second = Duration.ofSeconds(1);
        assertThrows(IllegalArgumentException.class, () -> new RetryPolicy(0, second, second, 1));
        assertThrows(IllegalArgumentException.class, () -> new RetryPolicy(1, Duration.ZERO, second, 1));
    }

    @Test
    void aTimeoutBeyondWhatGrpcCountsIsNone() {
        for (Duration timeout : List.of(ChronoUnit.FOREVER.getDuration(), Duration.ofDays(300 * 365))) {
            assertNull(new Timeouts(timeout, null).start(false));
            assertNull(new Timeouts(null, timeout).start(true));
        }
        assertNotNull(new Timeouts(null, Duration.ofDays(365)).start(true));
    }

    @Test
    void aFileThatHoldsNoCertificateIsRefused(@TempDir Path folder) throws IOException {
        HeadraceClientBuilder directory = HeadraceClient.builder("localhost:1").tls(Tls.authorities(folder));
        assertTrue(assertThrows(IllegalArgumentException.class, directory::build).getMessage().contains("is no file"));
        Path file = folder.resolve("ca.pem");
        for (String content : List.of("", "-----BEGIN CERTIFICATE-----\nAAAA\n",
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")) {
            Files.writeString(file, content);
            HeadraceClientBuilder builder = HeadraceClient.builder("localhost:1").tls(Tls.authorities(file));
            IllegalArgumentException refused = assertThrows(IllegalArgumentException.class, builder::build, content);
            assertTrue(refused.getMessage().contains("a TLS file"), refused.getMessage());
        }
    }

    @Test
    void everyStatusHasItsException() {
        for (Status.Code code : Status.Code.values()) {
            HeadraceException error = Failure.of(code.toStatus(), new Metadata(), "req-1");
            assertEquals(code, error.code());
            assertEquals("req-1", error.requestId().orElseThrow());
            assertEquals(code.name(), error.getMessage());
        }
        assertTrue(Failure.of(Status.UNAUTHENTICATED, null, null) instanceof PermissionDeniedException);
        Metadata damaged = new Metadata();
        damaged.put(Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER), new byte[] {7, 7});
        assertTrue(Failure.of(Status.NOT_FOUND, damaged, null) instanceof NotFoundException);
    }
}
