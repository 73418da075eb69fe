// A generation that outlives its reader: read some tokens, leave, come back for the rest.
// Run: go run . [SERVER]
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
	ctx := context.Background()

	submitted, err := client.Submit(ctx, headrace.Text("Once upon a time"),
		headrace.WithMaxTokens(48), headrace.WithTemperature(0), headrace.WithIgnoreEOS(true))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("request", submitted.RequestID)

	first, seen := "", uint32(0)
	for event, err := range client.Subscribe(ctx, submitted.RequestID).Events() {
		if err != nil {
			log.Fatal(err)
		}
		switch event := event.(type) {
		case headrace.Delta:
			first, seen = first+event.Text, event.NextTokenIndex()
		case headrace.Reconnecting:
			// A broken connection needs no care: the stream goes on after the last token.
			fmt.Println("connection lost, again in", event.Delay)
		}
		if seen >= 10 {
			break // leaves the stream; the generation goes on
		}
	}
	rest, err := client.Subscribe(ctx, submitted.RequestID, headrace.WithFromToken(seen)).Result()
	if err != nil {
		log.Fatal(err)
	}
	whole, err := client.Subscribe(ctx, submitted.RequestID).Result()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%q + %q\n", first, rest.Text())
	if first+rest.Text() != whole.Text() {
		log.Fatalf("that is not %q", whole.Text())
	}
}
