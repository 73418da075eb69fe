// Who the server must be and who the caller is: TLS files, API keys, and over which connections a
// key may go. The rule: a key never crosses a network in the clear. Messages name options and
// files, never a key.

package headrace

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// TLS says how a connection is encrypted, and who proves what to whom. All files are PEM. The zero
// value trusts what the system trusts.
type TLS struct {
	// CAFile holds the certificates of the authorities that may vouch for the server. Default:
	// those that the system trusts.
	CAFile string
	// CertFile and KeyFile are the caller's own certificate (with its chain) and private key, for
	// servers that ask for one (mTLS). They are read again for every connection, so that a renewed
	// certificate is used without a restart.
	CertFile, KeyFile string
	// ServerName is the name that the server's certificate must be for. Default: the host of the
	// target.
	ServerName string
}

// WithTLS encrypts the connections. Files that cannot be used are refused by [New].
func WithTLS(files TLS) Option {
	return func(c *config) error {
		made, err := files.config()
		if err != nil {
			return fmt.Errorf("headrace: WithTLS: %w", err)
		}
		return WithTLSConfig(made)(c)
	}
}

// WithTLSConfig encrypts the connections as a configuration of crypto/tls says, for what [WithTLS]
// has no field for.
func WithTLSConfig(tls *tls.Config) Option {
	return func(c *config) error {
		c.tls = tls
		return nil
	}
}

// WithInsecure sends everything in the clear, also to other machines. It can't be combined with an
// API key there.
func WithInsecure() Option {
	return func(c *config) error {
		c.insecure = true
		return nil
	}
}

// WithAPIKey sends the key with every call, as "authorization: Bearer KEY". In the clear it goes to
// this machine only.
func WithAPIKey(key string) Option {
	return func(c *config) error {
		invisible := func(r rune) bool { return r <= ' ' || r > '~' }
		if key == "" || strings.ContainsFunc(key, invisible) {
			return errors.New("headrace: WithAPIKey takes visible ASCII characters, without spaces or line breaks")
		}
		c.apiKey = key
		return nil
	}
}

// security holds the credentials of the channels to target.
func (c *config) security(target string) ([]grpc.DialOption, error) {
	if c.tls != nil && c.insecure {
		return nil, errors.New("headrace: give WithTLS or WithInsecure, not both")
	}
	if c.tls == nil && !c.insecure && !isLocal(target) {
		const problem = "headrace: %s is another machine: give WithTLS, or WithInsecure where the network is trusted"
		return nil, fmt.Errorf(problem, target)
	}
	if c.tls == nil && c.apiKey != "" && !isLocal(target) {
		return nil, fmt.Errorf("headrace: the API key would go to %s in the clear: give WithTLS", target)
	}
	transport := insecure.NewCredentials()
	if c.tls != nil {
		transport = credentials.NewTLS(c.tls)
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(transport)}
	if c.apiKey != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer{key: c.apiKey, encrypted: c.tls != nil}))
	}
	return options, nil
}

func (t TLS) config() (*tls.Config, error) {
	made := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, err
		}
		made.RootCAs = x509.NewCertPool()
		if !made.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no PEM certificates", t.CAFile)
		}
	}
	if (t.CertFile == "") != (t.KeyFile == "") {
		return nil, errors.New("CertFile and KeyFile belong together: give both, or neither")
	}
	if t.CertFile != "" {
		if _, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile); err != nil {
			const problem = "%s and %s are no certificate and its unencrypted key: %w"
			return nil, fmt.Errorf(problem, t.CertFile, t.KeyFile, err)
		}
		made.GetClientCertificate = t.certificate
	}
	return made, nil
}

func (t TLS) certificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
	return &pair, err
}

// bearer sends an API key with every call.
type bearer struct {
	key       string
	encrypted bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.key}, nil
}

// RequireTransportSecurity makes gRPC hold the rule of this file a second time.
func (b bearer) RequireTransportSecurity() bool { return b.encrypted }

// isLocal tells whether a gRPC target is this machine for certain: a Unix socket, localhost, or a
// loopback address. Names are not looked up: one that happens to resolve to a loopback address
// today is not local.
func isLocal(target string) bool {
	if strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "unix-abstract:") {
		return true
	}
	for _, scheme := range []string{"dns:///", "dns:", "passthrough:///", "passthrough:"} {
		if rest, found := strings.CutPrefix(target, scheme); found {
			target = rest
			break
		}
	}
	host, _, err := net.SplitHostPort(target)
	if err != nil {
		host = strings.Trim(target, "[]")
	}
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || (ip != nil && ip.IsLoopback())
}
