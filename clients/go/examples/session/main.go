// Many generations over one stream, as a gateway has them. Run: go run . [SERVER]
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	headrace "github.com/headrace/headrace/clients/go"
)

func main() {
	server := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		server = os.Args[1]
	}
	client, err := headrace.New(server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	session, err := client.Session(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()

	prompts, texts := map[uint32]string{}, map[uint32]string{}
	for _, prompt := range []string{"Once upon a time", "The capital of France is", "2 + 2 ="} {
		id, err := session.Submit(headrace.Text(prompt), headrace.WithMaxTokens(24), headrace.WithStop(".", "\n"))
		if err != nil {
			log.Fatal(err)
		}
		prompts[id] = prompt
	}
	// No more requests: the session ends when its generations have.
	if err := session.CloseSend(); err != nil {
		log.Fatal(err)
	}
	for event, err := range session.Events() {
		if err != nil {
			log.Fatal(err)
		}
		switch what := event.Event.(type) {
		case headrace.Delta:
			texts[event.StreamID] += what.Text
		case headrace.Failed:
			log.Fatal(what.Err)
		case headrace.Done:
			fmt.Printf("%q -> %q (%d tokens)\n", prompts[event.StreamID], texts[event.StreamID],
				what.Usage.OutputTokens)
		}
	}
}
