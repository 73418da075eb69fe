package io.github.headrace;

import io.github.headrace.v1.LoadModelResponse;

/**
 * A model that serves now.
 *
 * @param model the model
 * @param existing whether it served already
 */
public record LoadedModel(Model model, boolean existing) {

    static LoadedModel from(LoadModelResponse response) {
        return new LoadedModel(Model.from(response.getModel()), response.getExisting());
    }
}
