// A deadline for a call, a time limit for a generation, and what errors say. Run: go run . [SERVER]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

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
	prompt := headrace.Text("Once upon a time")

	// The context's deadline is the call's, on both sides.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	_, err = client.Generate(ctx, prompt, headrace.WithIgnoreEOS(true)).Result()
	if !errors.Is(err, headrace.ErrDeadline) {
		log.Fatal("the deadline did not pass: ", err)
	}
	fmt.Println("the call's deadline passed:", err)

	// With a time limit the answer so far is a result, and its finish reason says why it ended.
	answer, err := client.GenerateDurable(context.Background(), prompt,
		headrace.WithIgnoreEOS(true), headrace.WithMaxTokens(500), headrace.WithTimeLimit(50*time.Millisecond)).Result()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s after %d tokens\n", answer.FinishReason(), len(answer.TokenIDs()))

	// A request that breaks a rule names field, rule and limit.
	_, err = client.Complete(context.Background(), prompt, headrace.WithTopP(7))
	var refused *headrace.Error
	if !errors.As(err, &refused) || !errors.Is(err, headrace.ErrInvalid) {
		log.Fatal("top_p 7 was not refused: ", err)
	}
	for _, violation := range refused.Violations {
		fmt.Printf("%s: %s\n", violation.Field, violation.Description)
	}
}
