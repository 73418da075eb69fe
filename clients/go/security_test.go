package headrace_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	headrace "github.com/headrace/headrace/clients/go"
)

const key = "hr-0123456789"

// certificate writes a new key and a certificate for it, signed by itself, and returns the paths of
// both.
func certificate(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotAfter:    time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	certFile, keyFile = filepath.Join(folder, name+".pem"), filepath.Join(folder, name+"-key.pem")
	blocks := map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "EC PRIVATE KEY", Bytes: secret},
	}
	for file, block := range blocks {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// serveTLS runs a fake behind a new certificate and returns the file that vouches for it.
func serveTLS(t *testing.T, f *fake, clients string) (address, caFile string) {
	t.Helper()
	certFile, keyFile := certificate(t, "server")
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}}
	if clients != "" {
		text, err := os.ReadFile(clients)
		if err != nil {
			t.Fatal(err)
		}
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		config.ClientCAs.AppendCertsFromPEM(text)
	}
	address, _ = serve(t, f, "127.0.0.1:0", grpc.Creds(credentials.NewTLS(config)))
	return address, certFile
}

func TestKeyGoesWithEveryCall(t *testing.T) {
	f := &fake{}
	address, caFile := serveTLS(t, f, "")
	client := connect(t, address, headrace.WithTLS(headrace.TLS{CAFile: caFile}), headrace.WithAPIKey(key))
	if _, err := client.Tokenize(background, "ab", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Generate(background, headrace.Text("hello")).Result(); err != nil {
		t.Fatal(err)
	}
	for _, header := range f.headers {
		if got := header.Get("authorization"); len(got) != 1 || got[0] != "Bearer "+key {
			t.Error(got)
		}
		if !strings.HasPrefix(header.Get("user-agent")[0], "headrace-go/"+headrace.Version) {
			t.Error(header.Get("user-agent"))
		}
	}
}

func TestServerThatNobodyVouchesForIsRefused(t *testing.T) {
	f := &fake{}
	address, _ := serveTLS(t, f, "")
	other, _ := certificate(t, "other")
	for _, trusted := range []string{other, ""} {
		client := connect(t, address, headrace.WithTLS(headrace.TLS{CAFile: trusted}), headrace.WithAPIKey(key))
		_, err := client.Tokenize(background, "ab", nil)
		if !errors.Is(err, headrace.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") ||
			strings.Contains(err.Error(), key) {
			t.Error(err)
		}
	}
	if len(f.headers) != 0 {
		t.Error("the key went out")
	}
}

func TestClientsShowTheirCertificate(t *testing.T) {
	certFile, keyFile := certificate(t, "client")
	address, caFile := serveTLS(t, &fake{}, certFile)
	_, err := connect(t, address, headrace.WithTLS(headrace.TLS{CAFile: caFile})).Tokenize(background, "ab", nil)
	if !errors.Is(err, headrace.ErrUnavailable) {
		t.Error("without a certificate:", err)
	}
	files := headrace.TLS{CAFile: caFile, CertFile: certFile, KeyFile: keyFile}
	if _, err := connect(t, address, headrace.WithTLS(files)).Tokenize(background, "ab", nil); err != nil {
		t.Error(err)
	}
	files.ServerName = "elsewhere.example"
	_, err = connect(t, address, headrace.WithTLS(files)).Tokenize(background, "ab", nil)
	if err == nil || !strings.Contains(err.Error(), "elsewhere.example") {
		t.Error(err)
	}
}

func TestKeysAndPlaintextStayOnThisMachine(t *testing.T) {
	local := []string{"127.0.0.1:50051", "127.8.8.8:1", "localhost:50051", "LOCALHOST:1", "[::1]:50051",
		"unix:/tmp/headrace.sock",
		"unix-abstract:headrace", "dns:///localhost:50051", "passthrough:///127.0.0.1:1"}
	remote := []string{"10.0.0.1:50051", "gpu.example:443", "127.0.0.1.example:50051", "localhost.example:1",
		"[2001:db8::1]:50051", "dns:///gpu.example:443", "xds:///localhost", "dns://127.0.0.1/gpu.example:443",
		"0.0.0.0:50051", "localhost:1,gpu.example:1"}
	for _, target := range local {
		if _, err := headrace.New(target, headrace.WithAPIKey(key)); err != nil {
			t.Error(target, err)
		}
	}
	for _, target := range remote {
		if _, err := headrace.New(target); err == nil || !strings.Contains(err.Error(), "another machine") {
			t.Error(target, err)
		}
		_, err := headrace.New(target, headrace.WithInsecure(), headrace.WithAPIKey(key))
		if err == nil || !strings.Contains(err.Error(), "in the clear") || strings.Contains(err.Error(), key) {
			t.Error(target, err)
		}
		_, err = headrace.New(target, headrace.WithTLS(headrace.TLS{}), headrace.WithAPIKey(key))
		if err != nil && !strings.HasPrefix(target, "xds") {
			t.Error(target, err)
		}
	}
}
