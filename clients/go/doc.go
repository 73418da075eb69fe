// Package headrace is the Go client of Headrace, a gRPC server for large language models.
//
//	client, err := headrace.New("127.0.0.1:50051")
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer client.Close()
//	messages := []headrace.Message{headrace.User("What is a KV cache?")}
//	for piece, err := range client.Chat(ctx, messages).Text() {
//		if err != nil {
//			log.Fatal(err)
//		}
//		fmt.Print(piece)
//	}
//
// Every call takes a context: its deadline is the call's deadline on both sides, and cancelling it
// ends the call (and with it a generation that [Client.Generate] or [Client.Chat] started).
// Failures are [*Error] values, which [errors.Is] compares with the Err variables of this package.
//
// [Client.Submit] starts a generation that outlives its readers and [Client.Subscribe] reads it,
// from any token on. A subscription whose connection breaks is opened again and continues after the
// last token, without a lost or doubled one; [Client.GenerateDurable] is both in one.
//
// The generated stubs are in the package headracev1 beside this one.
package headrace

// Version is the client's version. It is the server's as well: both are published together.
const Version = "0.1.0"
