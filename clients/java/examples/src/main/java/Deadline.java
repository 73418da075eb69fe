import io.github.headrace.Completion;
import io.github.headrace.DeadlineExceededException;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;
import java.time.Duration;

/** A deadline for a call, and a time limit for a generation. */
public class Deadline {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options =
                GenerationOptions.builder().maxTokens(500).ignoreEos(true).build();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            HeadraceClient impatient = client.withTimeout(Duration.ofMillis(200));
            try (GenerationStream stream = impatient.generate("Once upon a time", options)) {
                stream.result();
            } catch (DeadlineExceededException late) {
                System.out.println("the call's deadline passed: " + late.getMessage());
            }
            // With a time limit the answer so far is a result, and its finish reason says why it
            // ended.
            GenerationOptions limited =
                    options.toBuilder().timeLimit(Duration.ofMillis(50)).build();
            String id = client.submit("Once upon a time", limited).requestId();
            try (GenerationStream stream = client.subscribe(id)) {
                Completion answer = stream.result();
                System.out.println(
                        answer.finishReason() + " after " + answer.tokenIds().size() + " tokens");
            }
        }
    }
}
