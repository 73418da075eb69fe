// A server with TLS that asks for an API key. Run: HEADRACE_API_KEY=... go run . SERVER CA_FILE
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	headrace "github.com/headrace/headrace/clients/go"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: HEADRACE_API_KEY=... go run . SERVER CA_FILE")
	}
	client, err := headrace.New(os.Args[1],
		// CertFile and KeyFile as well where the server asks for a certificate.
		headrace.WithTLS(headrace.TLS{CAFile: os.Args[2]}),
		headrace.WithAPIKey(os.Getenv("HEADRACE_API_KEY")))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	completion, err := client.Complete(context.Background(), headrace.Text("Once upon a time"),
		headrace.WithMaxTokens(16))
	switch {
	case errors.Is(err, headrace.ErrUnauthenticated):
		log.Fatal("the server does not know this key: ", err)
	case errors.Is(err, headrace.ErrPermissionDenied):
		log.Fatal("this key may not do that: ", err)
	case err != nil:
		log.Fatal(err)
	}
	fmt.Printf("%q\n", completion.Text())
}
