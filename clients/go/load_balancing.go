// How the addresses of a target are used: one of them, all in turn, or each by what its server can
// do. The policies are grpc-go's own.

package headrace

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/metadata"
)

// Policies for [WithLoadBalancing].
const (
	// PickFirst keeps each connection to one address.
	PickFirst = "pick_first"
	// RoundRobin uses all addresses in turn.
	RoundRobin = "round_robin"
	// WeightedRoundRobin uses each address by what its server says it can do. A key then needs the
	// permission read, and the program has to
	// import _ "google.golang.org/grpc/balancer/weightedroundrobin".
	WeightedRoundRobin = "weighted_round_robin"
)

var balancingPolicies = []string{PickFirst, RoundRobin, WeightedRoundRobin}

// WithLoadBalancing says how each connection uses a target that has several addresses, such as a
// name in DNS ("dns:///headrace.internal:50051"). The default is [PickFirst].
func WithLoadBalancing(policy string) Option {
	return func(c *config) error {
		if !slices.Contains(balancingPolicies, policy) {
			known := strings.Join(balancingPolicies, ", ")
			return fmt.Errorf("headrace: WithLoadBalancing takes one of %s, not %q", known, policy)
		}
		if policy == WeightedRoundRobin && balancer.Get(policy) == nil {
			return fmt.Errorf("headrace: WithLoadBalancing: %s needs "+
				`import _ "google.golang.org/grpc/balancer/weightedroundrobin"`, policy)
		}
		c.balancing = policy
		return nil
	}
}

// loadRequested has servers report their load at the ends of calls, where weights are made of it.
func (c *config) loadRequested() []grpc.DialOption {
	if c.balancing != WeightedRoundRobin {
		return nil
	}
	ask := func(ctx context.Context) context.Context {
		return metadata.AppendToOutgoingContext(ctx, "endpoint-load-metrics-format", "bin")
	}
	unary := func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
		next grpc.UnaryInvoker, options ...grpc.CallOption) error {
		return next(ask(ctx), method, request, reply, conn, options...)
	}
	stream := func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
		next grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
		return next(ask(ctx), desc, conn, method, options...)
	}
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(unary), grpc.WithChainStreamInterceptor(stream)}
}
