// A conversation of two turns. Run: go run . [SERVER]
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

	said := []headrace.Message{headrace.User("What is a KV cache?")}
	first, err := client.Chat(ctx, said, headrace.WithMaxTokens(64)).Result()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(first.Text())

	said = append(said, headrace.Assistant(first.Text()), headrace.User("Why does it help?"))
	for piece, err := range client.Chat(ctx, said, headrace.WithMaxTokens(64)).Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(piece)
	}
	fmt.Println()
}
