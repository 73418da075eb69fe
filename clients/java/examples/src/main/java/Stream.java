import io.github.headrace.GenerationEvent.Accepted;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationEvent.Done;
import io.github.headrace.GenerationEvent.OutputFinished;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;

/** An answer as it is generated: its text, then its events. */
public class Stream {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options =
                GenerationOptions.builder().maxTokens(32).stop(".").temperature(0.8).seed(1).build();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            try (GenerationStream stream = client.generate("Once upon a time", options)) {
                for (String piece : stream.text()) {
                    System.out.print(piece);
                }
                System.out.println();
            }
            try (GenerationStream stream = client.generate("The capital of France is", options)) {
                stream.forEachRemaining(event -> {
                    if (event instanceof Accepted accepted) {
                        System.out.println("request " + accepted.requestId());
                    } else if (event instanceof Delta delta) {
                        System.out.println(delta.tokenIds() + " " + delta.text());
                    } else if (event instanceof OutputFinished finished) {
                        System.out.println("finished: " + finished.reason());
                    } else if (event instanceof Done done) {
                        System.out.println(done.usage());
                    }
                });
            }
        }
    }
}
