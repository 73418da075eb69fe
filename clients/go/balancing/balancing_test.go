// Targets of several addresses, before the two real servers that tests/clients/balanced_services.py
// runs: the first one's engine needs half the rows for as many requests per second.

package balancing_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/balancer/weightedroundrobin"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	headrace "github.com/headrace/headrace/clients/go"
	pb "github.com/headrace/headrace/clients/go/headracev1"
)

// gRPC makes no use of weights before a connection is that old.
const blackout = 10 * time.Second

// servers resolves any target of its scheme to both servers.
func servers(t *testing.T) resolver.Builder {
	t.Helper()
	addresses := os.Getenv("HEADRACE_TEST_BALANCED")
	if addresses == "" {
		t.Skip("HEADRACE_TEST_BALANCED names no servers")
	}
	found := manual.NewBuilderWithScheme("both")
	state := resolver.State{}
	for _, address := range strings.Split(addresses, ",") {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address})
	}
	found.InitialState(state)
	return found
}

func connect(t *testing.T, policy string) *headrace.Client {
	t.Helper()
	client, err := headrace.New("both:///", headrace.WithInsecure(), headrace.WithLoadBalancing(policy),
		headrace.WithDialOptions(grpc.WithResolvers(servers(t))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// shares is how many of some calls the first and the second server answered.
func shares(t *testing.T, client *headrace.Client, calls int) (first, second int) {
	t.Helper()
	for range calls {
		load, err := client.Load(context.Background(), "")
		if err != nil {
			t.Fatal(err)
		}
		if load.WaitingTokens == 1 {
			first++
		} else {
			second++
		}
	}
	return first, second
}

// until tries again until calls are spread as they should be; both servers have to be connected.
func until(t *testing.T, client *headrace.Client, good func(first, second int) bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(500 * time.Millisecond) {
		first, second := shares(t, client, 120)
		if good(first, second) {
			return
		}
		if time.Now().After(end) {
			t.Fatal(first, second)
		}
	}
}

func TestBalancedInTurn(t *testing.T) {
	until(t, connect(t, headrace.RoundRobin), func(first, second int) bool { return first == second })
}

func TestBalancedKeepsToOne(t *testing.T) {
	until(t, connect(t, headrace.PickFirst), func(first, second int) bool { return first == 0 || second == 0 })
}

func TestBalancedByWhatServersCanDo(t *testing.T) {
	client := connect(t, headrace.WeightedRoundRobin)
	shares(t, client, 2)
	time.Sleep(blackout)
	until(t, client, func(first, second int) bool { return 5*first > 8*second && 2*first < 5*second })
}

// The file that is published for stubs of one's own is a service config that grpc-go takes, and by
// it calls are spread.
func TestBalancedByThePublishedServiceConfig(t *testing.T) {
	text, err := os.ReadFile("../../service_config.json")
	if err != nil {
		t.Fatal(err)
	}
	channel, err := grpc.NewClient("both:///", grpc.WithDefaultServiceConfig(string(text)),
		grpc.WithResolvers(servers(t)), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer channel.Close()
	answered := map[uint64]bool{}
	for end := time.Now().Add(time.Minute); len(answered) < 2 && time.Now().Before(end); {
		load, err := pb.NewInferenceServiceClient(channel).GetLoad(context.Background(), &pb.GetLoadRequest{})
		if err != nil {
			t.Fatal(err)
		}
		answered[load.WaitingTokens] = true
	}
	if len(answered) != 2 {
		t.Error(answered)
	}
}
