// Several streams at once, read event by event. Run: go run . [SERVER]
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"sync"

	headrace "github.com/headrace/headrace/clients/go"
)

func main() {
	server := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		server = os.Args[1]
	}
	// Two connections, which calls use in turn: each belongs to one of the server's processes.
	client, err := headrace.New(server, headrace.WithChannels(2))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	var group sync.WaitGroup
	for _, prompt := range []string{"Once upon a time", "The capital of France is", "2 + 2 ="} {
		group.Add(1)
		go func() {
			defer group.Done()
			ask(client, prompt)
		}()
	}
	group.Wait()
}

func ask(client *headrace.Client, prompt string) {
	text := ""
	stream := client.Generate(context.Background(), headrace.Text(prompt), headrace.WithMaxTokens(24),
		headrace.WithStop(".", "\n"))
	for event, err := range stream.Events() {
		if err != nil {
			log.Fatal(err)
		}
		switch event := event.(type) {
		case headrace.Delta:
			text += event.Text
		case headrace.OutputFinished:
			fmt.Printf("%q -> %q (%s)\n", prompt, text, event.Reason)
		case headrace.Done:
			fmt.Printf("%q: first token after %v\n", prompt, event.Ledger.TTFT)
		}
	}
}
