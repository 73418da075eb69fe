package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.Gson;
import io.github.headrace.v1.GetLoadRequest;
import io.github.headrace.v1.InferenceServiceGrpc;
import io.grpc.EquivalentAddressGroup;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.NameResolver;
import io.grpc.NameResolverProvider;
import io.grpc.NameResolverRegistry;
import io.grpc.StatusOr;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.BiPredicate;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/**
 * A target of several addresses: the two real servers that tests/clients/balanced_services.py runs.
 * The first one's engine needs half the rows for as many requests per second.
 */
@Timeout(300)
@EnabledIfEnvironmentVariable(named = "HEADRACE_TEST_BALANCED", matches = ".+")
class LoadBalancingTest {
    private static final String TARGET = "both:///servers";
    // gRPC makes no use of weights before a connection is that old.
    private static final long BLACKOUT_MS = 10_000;

    @BeforeAll
    static void resolveTheTarget() {
        NameResolverRegistry.getDefaultRegistry().register(new Both());
    }

    @Test
    void addressesAreUsedInTurn() throws InterruptedException {
        until(LoadBalancing.ROUND_ROBIN, 0, (first, second) -> first.equals(second));
    }

    @Test
    void oneAddressIsKeptTo() throws InterruptedException {
        until(LoadBalancing.PICK_FIRST, 0, (first, second) -> first == 0 || second == 0);
    }

    @Test
    void addressesAreUsedByWhatTheirServersCanDo() throws InterruptedException {
        until(LoadBalancing.WEIGHTED_ROUND_ROBIN, BLACKOUT_MS,
                (first, second) -> 5 * first > 8 * second && 2 * first < 5 * second);
    }

    @Test
    @SuppressWarnings("unchecked")
    void thePublishedServiceConfigIsTaken() throws IOException {
        String text = Files.readString(Path.of(System.getenv("HEADRACE_TEST_SERVICE_CONFIG")));
        ManagedChannel channel = Grpc.newChannelBuilder(TARGET, InsecureChannelCredentials.create())
                .defaultServiceConfig((Map<String, ?>) new Gson().fromJson(text, Map.class))
                .build();
        try {
            Set<Long> answered = new HashSet<>();
            InferenceServiceGrpc.InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
            long end = System.nanoTime() + 60_000_000_000L;
            while (answered.size() < 2 && System.nanoTime() < end) {
                answered.add(stub.getLoad(GetLoadRequest.getDefaultInstance()).getWaitingTokens());
            }
            assertEquals(Set.of(1L, 2L), answered);
        } finally {
            channel.shutdownNow();
        }
    }

    /** Tries again until calls are spread as they should be; both servers have to be connected. */
    private static void until(LoadBalancing how, long pauseMs, BiPredicate<Integer, Integer> good)
            throws InterruptedException {
        try (HeadraceClient client = HeadraceClient.builder(TARGET).plaintext().loadBalancing(how).build()) {
            firstOf(client, 2);
            Thread.sleep(pauseMs);
            long end = System.nanoTime() + 120_000_000_000L;
            int first = firstOf(client, 120);
            while (!good.test(first, 120 - first)) {
                assertTrue(System.nanoTime() < end, first + " of 120 calls");
                Thread.sleep(500);
                first = firstOf(client, 120);
            }
        }
    }

    /** How many of some calls the first server answered. */
    private static int firstOf(HeadraceClient client, int calls) {
        int first = 0;
        for (int i = 0; i < calls; i++) {
            first += client.load().waitingTokens() == 1 ? 1 : 0;
        }
        return first;
    }

    /** Resolves any target of its scheme to both servers. */
    private static final class Both extends NameResolverProvider {
        @Override
        protected boolean isAvailable() {
            return true;
        }

        @Override
        protected int priority() {
            return 5;
        }

        @Override
        public String getDefaultScheme() {
            return "both";
        }

        @Override
        public NameResolver newNameResolver(URI target, NameResolver.Args args) {
            if (!target.getScheme().equals("both")) {
                return null;
            }
            return new NameResolver() {
                @Override
                public String getServiceAuthority() {
                    return "servers";
                }

                @Override
                public void start(Listener2 listener) {
                    List<EquivalentAddressGroup> found = Stream.of(System.getenv("HEADRACE_TEST_BALANCED").split(","))
                            .map(address -> address.split(":"))
                            .map(parts -> new InetSocketAddress(parts[0], Integer.parseInt(parts[1])))
                            .map(EquivalentAddressGroup::new)
                            .toList();
                    listener.onResult(ResolutionResult.newBuilder()
                            .setAddressesOrError(StatusOr.fromValue(found))
                            .build());
                }

                @Override
                public void shutdown() {}
            };
        }
    }
}
