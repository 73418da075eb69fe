package io.github.headrace;

import com.google.protobuf.Descriptors.FieldDescriptor;
import io.github.headrace.v1.SamplingParameters;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * What one model is and what it allows.
 *
 * @param name the name that requests use
 * @param revision name and content hash of the folder
 * @param architecture as config.json names it
 * @param parameterCount parameters of the model
 * @param dtype type the weights are computed in: bf16, fp16 or fp32
 * @param vocabularySize tokens of the vocabulary
 * @param maxContextTokens most tokens of prompt and output together
 * @param maxOutputs most outputs (n) of one request
 * @param endOfTextTokenIds the tokens that end an output
 * @param hasChatTemplate whether chat works
 * @param defaultSampling what absent sampling options become, by the wire's field names
 * @param kvBlockTokens tokens per KV cache block
 * @param kvBlocks KV cache blocks of the server
 * @param device what the model computes on
 * @param memoryPlan how the device's memory is divided; empty until the model is loaded
 */
public record Model(
        String name,
        String revision,
        String architecture,
        long parameterCount,
        String dtype,
        int vocabularySize,
        int maxContextTokens,
        int maxOutputs,
        List<Integer> endOfTextTokenIds,
        boolean hasChatTemplate,
        Map<String, Number> defaultSampling,
        int kvBlockTokens,
        int kvBlocks,
        String device,
        Optional<MemoryPlan> memoryPlan) {

    static Model from(io.github.headrace.v1.Model model) {
        return new Model(
                model.getName(),
                model.getRevision(),
                model.getArchitecture(),
                model.getParameterCount(),
                model.getDtype(),
                model.getVocabularySize(),
                model.getMaxContextTokens(),
                model.getMaxOutputs(),
                model.getEndOfTextTokenIdsList(),
                model.getHasChatTemplate(),
                scalars(model.getDefaultSampling()),
                model.getKvBlockTokens(),
                model.getKvBlocks(),
                model.getDevice(),
                model.hasMemoryPlan() ? Optional.of(MemoryPlan.from(model.getMemoryPlan())) : Optional.empty());
    }

    /** The scalars that are set. */
    private static Map<String, Number> scalars(SamplingParameters sampling) {
        Map<String, Number> scalars = new LinkedHashMap<>();
        for (Map.Entry<FieldDescriptor, Object> field : sampling.getAllFields().entrySet()) {
            if (field.getValue() instanceof Number number) {
                scalars.put(field.getKey().getName(), number);
            }
        }
        return Collections.unmodifiableMap(scalars);
    }
}
