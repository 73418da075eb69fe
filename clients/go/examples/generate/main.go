// A whole answer, then a streamed one. Run: go run . [SERVER]
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

	prompt := headrace.Text("Once upon a time")
	completion, err := client.Complete(ctx, prompt, headrace.WithMaxTokens(32), headrace.WithTemperature(0))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%q (%s, %d tokens)\n", completion.Text(), completion.FinishReason(), completion.Usage.OutputTokens)

	for piece, err := range client.Generate(ctx, prompt, headrace.WithMaxTokens(32), headrace.WithSeed(1)).Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(piece)
	}
	fmt.Println()
}
