import io.github.headrace.Completion;
import io.github.headrace.GenerationOptions;
import io.github.headrace.HeadraceClient;

/** A whole answer, and what it cost. */
public class Generate {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions greedy =
                GenerationOptions.builder().maxTokens(32).temperature(0).build();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            Completion answer = client.complete("Once upon a time", greedy);
            System.out.println(answer.text());
            System.out.printf(
                    "%s after %d tokens, the first one after %d ms%n",
                    answer.finishReason(),
                    answer.usage().outputTokens(),
                    answer.ledger().ttft().toMillis());
        }
    }
}
