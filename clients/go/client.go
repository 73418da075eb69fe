// Who speaks to a server: the connections of a client, opened, used in turn, closed. What is sent
// is in generate.go and calls.go, how a connection is secured in security.go, what is sent again in
// retry.go.

package headrace

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"

	"github.com/headrace/headrace/clients/go/headracev1"
)

const (
	defaultTimeout = 60 * time.Second
	maxChannels    = 256
	// A Complete answer with 128 outputs and 20 log probabilities a token passes gRPC's default of
	// 4 MiB.
	maxReceiveBytes = 64 << 20
	// A dead peer is noticed after both, also while a stream is silent.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second
	connectTimeout   = 10 * time.Second
)

// Client speaks to one Headrace server. It is safe for concurrent use. Close it when it is no
// longer needed.
type Client struct {
	channels []*grpc.ClientConn
	turn     atomic.Uint64
	retry    RetryPolicy
	timeout  time.Duration
}

// Option configures a [Client].
type Option func(*config) error

type config struct {
	apiKey      string
	tls         *tls.Config
	insecure    bool
	channels    int
	timeout     time.Duration
	retry       RetryPolicy
	balancing   string
	dialOptions []grpc.DialOption
}

// WithChannels opens n connections (1 to 256, 1 by default) that calls use in turn. A connection
// belongs to one of the server's service processes, so that a busy client of a server with several
// wants several. All must lead to the same server.
func WithChannels(n int) Option {
	return func(c *config) error {
		if n < 1 || n > maxChannels {
			return fmt.Errorf("headrace: WithChannels takes 1 to %d, not %d", maxChannels, n)
		}
		c.channels = n
		return nil
	}
}

// WithTimeout limits calls that do not generate and whose context has no deadline. The default is a
// minute; 0 means no limit.
func WithTimeout(limit time.Duration) Option {
	return func(c *config) error {
		if limit < 0 {
			return fmt.Errorf("headrace: WithTimeout takes 0 or more, not %v", limit)
		}
		c.timeout = limit
		return nil
	}
}

// WithDialOptions adds options of grpc-go, for example interceptors. They come last and override
// the client's own.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(c *config) error {
		c.dialOptions = append(c.dialOptions, options...)
		return nil
	}
}

// New prepares a client of the server at target: "host:port", "unix:/path" or any other gRPC
// target. Connections are made by the first calls. Without [WithTLS], [WithTLSConfig] or
// [WithInsecure] the target must be this machine, and the connection is plaintext.
func New(target string, options ...Option) (*Client, error) {
	c := config{channels: 1, timeout: defaultTimeout, retry: RetryPolicy{}.withDefaults(), balancing: PickFirst}
	for _, option := range options {
		if err := option(&c); err != nil {
			return nil, err
		}
	}
	security, err := c.security(target)
	if err != nil {
		return nil, err
	}
	client := &Client{retry: c.retry, timeout: c.timeout}
	for range c.channels {
		channel, err := grpc.NewClient(target, append(security, c.dial()...)...)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("headrace: %w", err), client.Close())
		}
		client.channels = append(client.channels, channel)
	}
	return client, nil
}

// Close ends all connections; calls that still run are cancelled.
func (c *Client) Close() error {
	var failures []error
	for _, channel := range c.channels {
		failures = append(failures, channel.Close())
	}
	return errors.Join(failures...)
}

// dial holds everything about a channel but its security.
func (c *config) dial() []grpc.DialOption {
	reconnect := backoff.DefaultConfig
	// A server that comes back after a restart is found within the retries.
	reconnect.BaseDelay, reconnect.MaxDelay = 100*time.Millisecond, 3*time.Second
	options := append([]grpc.DialOption{
		grpc.WithUserAgent("headrace-go/" + Version),
		grpc.WithDefaultServiceConfig(c.retry.serviceConfig(c.balancing)),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceiveBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: connectTimeout}),
	}, c.loadRequested()...)
	return append(options, c.dialOptions...)
}

// channel is the connection whose turn it is.
func (c *Client) channel() *grpc.ClientConn {
	return c.channels[(c.turn.Add(1)-1)%uint64(len(c.channels))]
}

func (c *Client) inference() headracev1.InferenceServiceClient {
	return headracev1.NewInferenceServiceClient(c.channel())
}

// limited gives calls that do not generate a deadline, unless they have one.
func (c *Client) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || c.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.timeout)
}
