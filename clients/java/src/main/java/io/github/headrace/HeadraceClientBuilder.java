package io.github.headrace;

import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.LoadBalancerRegistry;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.ManagedChannelRegistry;
import io.grpc.Metadata;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * How to reach a server. Without {@link #plaintext} or {@link #tls}, connections to this machine
 * are plaintext and all others are TLS with the authorities that Java trusts.
 */
public final class HeadraceClientBuilder {
    /** The most connections of one client. */
    public static final int MAX_CHANNELS = 64;

    // A Complete answer with 128 outputs and 20 log probabilities a token passes gRPC's default of
    // 4 MiB.
    private static final int MAX_RECEIVE_BYTES = 64 << 20;
    // A dead peer is noticed after keepalive time + timeout, also while a stream is silent.
    private static final Duration KEEPALIVE_TIME = Duration.ofSeconds(30);
    private static final Duration KEEPALIVE_TIMEOUT = Duration.ofSeconds(10);
    private static final int MAX_GRPC_ATTEMPTS = 5;
    private static final String AUTHORIZATION = "authorization";
    // Has servers report their load at the ends of calls, where weights are made of it.
    private static final String ASKS_FOR_LOAD = "endpoint-load-metrics-format";
    // Calls that are sent again after UNAVAILABLE, because they may be sent twice: those that read,
    // Cancel, and Submit, which always has an idempotency key. Generate, Chat and Complete are not
    // sent again: the caller may have seen tokens, and a second call costs a whole generation.
    private static final Map<String, List<String>> IDEMPOTENT = Map.of(
            "headrace.v1.InferenceService",
            List.of(
                    "Submit", "Cancel", "ListRequests", "Tokenize", "Detokenize", "GetModel", "ListModels", "GetLoad"),
            "headrace.v1.AdminService",
            List.of("LoadModel", "ListRepository", "Drain", "GetMemoryPlan"));

    private final String target;
    private final Metadata headers = new Metadata();
    private String apiKey;
    private boolean keyInTheClear;
    private Boolean plaintext;
    private Tls tls;
    private int channels = 1;
    private Duration timeout = Duration.ofSeconds(60);
    private RetryPolicy retry = RetryPolicy.DEFAULT;
    private LoadBalancing balancing = LoadBalancing.PICK_FIRST;
    private Executor executor;

    HeadraceClientBuilder(String target) {
        this.target = Objects.requireNonNull(target, "target");
    }

    /**
     * Sends an API key with every call. A key never crosses a network in the clear: {@link #build}
     * refuses plaintext to other machines.
     *
     * @param key as {@code headrace keys} printed it
     * @return this builder
     */
    public HeadraceClientBuilder apiKey(String key) {
        if (key.isEmpty() || !key.chars().allMatch(unit -> unit > ' ' && unit <= '~')) {
            throw new IllegalArgumentException(
                    "apiKey must be visible ASCII characters, without spaces or line breaks");
        }
        apiKey = key;
        return this;
    }

    /**
     * Sends the API key in the clear all the same; whoever is on the way can read it.
     *
     * @return this builder
     */
    public HeadraceClientBuilder allowPlaintextKey() {
        keyInTheClear = true;
        return this;
    }

    /**
     * Encrypts the connections.
     *
     * @param settings which authorities to trust, and who the caller is
     * @return this builder
     */
    public HeadraceClientBuilder tls(Tls settings) {
        tls = Objects.requireNonNull(settings, "settings");
        plaintext = false;
        return this;
    }

    /**
     * Does not encrypt the connections.
     *
     * @return this builder
     */
    public HeadraceClientBuilder plaintext() {
        plaintext = true;
        tls = null;
        return this;
    }

    /**
     * Opens several connections, used in turn: a server of several service processes gives each
     * connection to one of them.
     *
     * @param count 1 to {@value #MAX_CHANNELS}; 1 by default
     * @return this builder
     */
    public HeadraceClientBuilder channels(int count) {
        if (count < 1 || count > MAX_CHANNELS) {
            throw new IllegalArgumentException("channels must be 1 to " + MAX_CHANNELS + ", not " + count);
        }
        channels = count;
        return this;
    }

    /**
     * How each connection uses a target that has several addresses, such as a name in DNS.
     *
     * @param how {@link LoadBalancing#PICK_FIRST} by default
     * @return this builder
     * @throws IllegalArgumentException gRPC's policy is not on the class path
     */
    public HeadraceClientBuilder loadBalancing(LoadBalancing how) {
        how.check(LoadBalancerRegistry.getDefaultRegistry());
        balancing = how;
        return this;
    }

    /**
     * How long calls that do not generate may take; see {@link HeadraceClient#withTimeout} for
     * single calls.
     *
     * @param limit the limit, 60 s by default; null: none
     * @return this builder
     */
    public HeadraceClientBuilder timeout(Duration limit) {
        timeout = limit;
        return this;
    }

    /**
     * What to send again after a broken connection, and how soon.
     *
     * @param policy {@link RetryPolicy#NONE} sends nothing twice
     * @return this builder
     */
    public HeadraceClientBuilder retry(RetryPolicy policy) {
        retry = Objects.requireNonNull(policy, "policy");
        return this;
    }

    /**
     * Sends one more metadata entry with every call.
     *
     * @param name lower-case
     * @param value visible ASCII
     * @return this builder
     */
    public HeadraceClientBuilder metadata(String name, String value) {
        headers.put(key(name), value);
        return this;
    }

    /**
     * Runs callbacks of futures and publishers. Default: gRPC's own pool of daemon threads.
     *
     * @param callbacks stays the caller's to end
     * @return this builder
     */
    public HeadraceClientBuilder executor(Executor callbacks) {
        executor = callbacks;
        return this;
    }

    /**
     * The client. Connections are made by its first calls.
     *
     * @return to be closed by the caller
     * @throws IllegalArgumentException a TLS file cannot be used, or the API key would cross a
     *     network in the clear
     */
    public HeadraceClient build() {
        boolean open = plaintext == null ? Target.isLocal(target) : plaintext;
        Metadata all = new Metadata();
        all.merge(headers);
        if (apiKey != null) {
            checkKey(open);
            all.put(key(AUTHORIZATION), "Bearer " + apiKey);
        }
        if (balancing == LoadBalancing.WEIGHTED_ROUND_ROBIN) {
            all.put(key(ASKS_FOR_LOAD), "bin");
        }
        Tls settings = open ? null : tls == null ? Tls.systemRoots() : tls;
        List<ManagedChannel> connections =
                IntStream.range(0, channels).mapToObj(i -> connection(settings)).toList();
        Transport transport =
                new Transport(connections, MetadataUtils.newAttachHeadersInterceptor(all), retry, executor);
        return new HeadraceClient(transport, new Timeouts(timeout, null));
    }

    private void checkKey(boolean open) {
        if (headers.containsKey(key(AUTHORIZATION))) {
            throw new IllegalArgumentException("give apiKey or an authorization entry in metadata, not both");
        }
        if (open && !keyInTheClear && !Target.isLocal(target)) {
            throw new IllegalArgumentException("apiKey would go to " + target
                    + " in the clear: use tls(), or allowPlaintextKey() if the network is trusted");
        }
    }

    private ManagedChannel connection(Tls settings) {
        ChannelCredentials credentials =
                settings == null ? InsecureChannelCredentials.create() : settings.credentials();
        ManagedChannelBuilder<?> builder = builder(credentials)
                .defaultServiceConfig(serviceConfig(retry, balancing))
                .disableServiceConfigLookUp()
                .maxInboundMessageSize(MAX_RECEIVE_BYTES)
                .keepAliveTime(KEEPALIVE_TIME.toSeconds(), TimeUnit.SECONDS)
                .keepAliveTimeout(KEEPALIVE_TIMEOUT.toSeconds(), TimeUnit.SECONDS);
        if (settings != null && settings.serverName() != null) {
            builder.overrideAuthority(settings.serverName());
        }
        if (Target.isLocal(target)) {
            builder.proxyDetector(address -> null);
        }
        if (executor != null) {
            builder.executor(executor);
        }
        return builder.build();
    }

    private ManagedChannelBuilder<?> builder(ChannelCredentials credentials) {
        try {
            return Grpc.newChannelBuilder(target, credentials);
        } catch (ManagedChannelRegistry.ProviderNotFoundException unusable) {
            // That is how gRPC says that certificates or keys can't be parsed.
            throw new IllegalArgumentException("cannot use a TLS file: " + unusable.getMessage(), unusable);
        }
    }

    private static Map<String, Object> serviceConfig(RetryPolicy retry, LoadBalancing balancing) {
        List<Map<String, Object>> used = List.of(Map.of(balancing.policy(), Map.of()));
        if (retry.maxAttempts() == 1) {
            return Map.of("loadBalancingConfig", used);
        }
        Map<String, Object> policy = Map.of(
                "maxAttempts", (double) Math.min(retry.maxAttempts(), MAX_GRPC_ATTEMPTS),
                "initialBackoff", seconds(retry.initialBackoff()),
                "maxBackoff", seconds(retry.maxBackoff()),
                "backoffMultiplier", retry.multiplier(),
                "retryableStatusCodes", List.of("UNAVAILABLE"));
        List<Map<String, String>> names = IDEMPOTENT.entrySet().stream()
                .flatMap(service -> names(service.getKey(), service.getValue()))
                .toList();
        List<Map<String, Object>> methods = List.of(Map.of("name", names, "retryPolicy", policy));
        return Map.of("loadBalancingConfig", used, "methodConfig", methods);
    }

    private static Stream<Map<String, String>> names(String service, List<String> methods) {
        return methods.stream().map(method -> Map.of("service", service, "method", method));
    }

    private static String seconds(Duration time) {
        return "%d.%09ds".formatted(time.getSeconds(), time.getNano());
    }

    private static Metadata.Key<String> key(String name) {
        return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
    }
}
