package main

import (
	"fmt"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// customKind is a kind that a CustomResourceDefinition adds to Kubernetes.
type customKind struct {
	structural *structuralschema.Structural
	validator  crdvalidation.SchemaValidator
}

// customKinds are those that are known, by API version and kind.
type customKinds map[metav1.TypeMeta]customKind

// read adds the kinds of a CustomResourceDefinition's file.
func (kinds customKinds) read(path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var external apiextensionsv1.CustomResourceDefinition
	if err := yaml.Unmarshal(content, &external); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, version := range external.Spec.Versions {
		var schema apiextensions.JSONSchemaProps
		if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(version.Schema.OpenAPIV3Schema, &schema, nil); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		structural, err := structuralschema.NewStructural(&schema)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		validator, _, err := crdvalidation.NewSchemaValidator(&schema)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		head := metav1.TypeMeta{APIVersion: external.Spec.Group + "/" + version.Name, Kind: external.Spec.Names.Kind}
		kinds[head] = customKind{structural, validator}
	}
	return nil
}

// check returns what is wrong with an object of the kind.
func (kind customKind) check(document []byte) []string {
	var object map[string]any
	if err := yaml.UnmarshalStrict(document, &object); err != nil {
		return []string{err.Error()}
	}
	var complaints []string
	for _, err := range crdvalidation.ValidateCustomResource(field.NewPath(""), object, kind.validator) {
		complaints = append(complaints, err.Error())
	}
	options := structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	for _, path := range pruning.PruneWithOptions(object, kind.structural, true, options) {
		complaints = append(complaints, "unknown field "+path)
	}
	return complaints
}
