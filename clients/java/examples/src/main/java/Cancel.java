import io.github.headrace.GenerationEvent;
import io.github.headrace.GenerationEvent.Delta;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;

/** Two ways to end a generation early. */
public class Cancel {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options =
                GenerationOptions.builder().maxTokens(200).ignoreEos(true).build();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            // Leaving the block closes the stream, and the server stops computing.
            try (GenerationStream stream = client.generate("Count: one, two,", options)) {
                for (GenerationEvent event : stream) {
                    if (event instanceof Delta delta) {
                        System.out.println("enough after " + delta.text());
                        break;
                    }
                }
            }
            // A submitted generation is ended by its id, from anywhere.
            String id = client.submit("Count: one, two,", options).requestId();
            System.out.println("cancelled: " + client.cancel(id));
            try (GenerationStream reader = client.subscribe(id)) {
                System.out.println("its readers see: " + reader.result().finishReason());
            }
        }
    }
}
