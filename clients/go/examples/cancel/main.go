// Three ways to end a generation early. Run: go run . [SERVER]
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
	server := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		server = os.Args[1]
	}
	client, err := headrace.New(server)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	prompt := headrace.Text("Count: one, two,")
	long := headrace.Options(headrace.WithMaxTokens(200), headrace.WithIgnoreEOS(true))

	// Leaving the loop cancels the call, and the server stops computing.
	for piece, err := range client.Generate(context.Background(), prompt, long).Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("enough after %q\n", piece)
		break
	}

	// So does cancelling the context.
	ctx, cancel := context.WithCancel(context.Background())
	for _, err := range client.Generate(ctx, prompt, long).Events() {
		if errors.Is(err, context.Canceled) {
			fmt.Println("cancelled by its context")
		} else if err != nil {
			log.Fatal(err)
		}
		cancel()
	}

	// A submitted generation is ended by its id, from anywhere.
	submitted, err := client.Submit(context.Background(), prompt, long)
	if err != nil {
		log.Fatal(err)
	}
	cancelled, err := client.Cancel(context.Background(), submitted.RequestID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("cancelled by its id:", cancelled)
	answer, err := client.Subscribe(context.Background(), submitted.RequestID).Result()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("its readers see:", answer.FinishReason())
}
