package io.github.headrace;

import io.grpc.LoadBalancerRegistry;

/** How each connection uses a target of several addresses; gRPC's own policies. */
public enum LoadBalancing {
    /** Keeps to one of them. */
    PICK_FIRST("pick_first"),
    /** Takes all in turn. */
    ROUND_ROBIN("round_robin"),
    /**
     * Uses each by what its server says it can do. Needs {@code io.grpc:grpc-xds} on the class path,
     * and a key with the permission {@code read}.
     */
    WEIGHTED_ROUND_ROBIN("weighted_round_robin");

    private final String policy;

    LoadBalancing(String policy) {
        this.policy = policy;
    }

    /** Name of the policy in a service config. */
    String policy() {
        return policy;
    }

    /** Throws IllegalArgumentException where gRPC has no such policy. */
    void check(LoadBalancerRegistry known) {
        if (known.getProvider(policy) == null) {
            throw new IllegalArgumentException(policy + " needs io.grpc:grpc-xds on the class path");
        }
    }
}
