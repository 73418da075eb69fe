package io.github.headrace;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Log probabilities (natural logarithm) of a run of tokens, as flat columns.
 *
 * @param sampled one per token: its own log probability
 * @param ranks one per token: its rank among all tokens, 1 being the most likely
 * @param topCounts one per token: how many entries of the two columns below are its own
 * @param topTokenIds the most likely tokens of each position, most likely first, one position after
 *     another
 * @param topLogprobs their log probabilities
 */
public record Logprobs(
        List<Float> sampled,
        List<Integer> ranks,
        List<Integer> topCounts,
        List<Integer> topTokenIds,
        List<Float> topLogprobs) {

    /**
     * The most likely tokens of one position with their log probabilities, most likely first.
     *
     * @param position of the token within this run, from 0
     * @return token id to log probability
     */
    public Map<Integer, Float> top(int position) {
        int first = entriesBefore(position);
        Map<Integer, Float> top = new LinkedHashMap<>();
        for (int entry = first; entry < first + topCounts.get(position); entry++) {
            top.put(topTokenIds.get(entry), topLogprobs.get(entry));
        }
        return top;
    }

    /** These columns without the tokens before {@code position}. */
    Logprobs from(int position) {
        int entries = entriesBefore(position);
        return new Logprobs(
                tail(sampled, position),
                tail(ranks, position),
                tail(topCounts, position),
                tail(topTokenIds, entries),
                tail(topLogprobs, entries));
    }

    static Logprobs from(io.github.headrace.v1.Logprobs columns) {
        return new Logprobs(
                columns.getSampledList(),
                columns.getRanksList(),
                columns.getTopCountsList(),
                columns.getTopTokenIdsList(),
                columns.getTopLogprobsList());
    }

    /** The columns of consecutive runs, one after another; null where there is no run. */
    static Logprobs joined(List<Logprobs> runs) {
        if (runs.isEmpty()) {
            return null;
        }
        Logprobs all = new Logprobs(
                new ArrayList<>(), new ArrayList<>(), new ArrayList<>(), new ArrayList<>(), new ArrayList<>());
        for (Logprobs run : runs) {
            all.sampled.addAll(run.sampled);
            all.ranks.addAll(run.ranks);
            all.topCounts.addAll(run.topCounts);
            all.topTokenIds.addAll(run.topTokenIds);
            all.topLogprobs.addAll(run.topLogprobs);
        }
        return new Logprobs(
                List.copyOf(all.sampled),
                List.copyOf(all.ranks),
                List.copyOf(all.topCounts),
                List.copyOf(all.topTokenIds),
                List.copyOf(all.topLogprobs));
    }

    private int entriesBefore(int position) {
        return topCounts.subList(0, position).stream().mapToInt(Integer::intValue).sum();
    }

    private static <T> List<T> tail(List<T> column, int first) {
        return column.subList(Math.min(first, column.size()), column.size());
    }
}
