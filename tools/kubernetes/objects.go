package main

import (
	"fmt"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/apps"
	appsvalidation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/autoscaling"
	autoscalingvalidation "k8s.io/kubernetes/pkg/apis/autoscaling/validation"
	"k8s.io/kubernetes/pkg/apis/batch"
	"k8s.io/kubernetes/pkg/apis/core"
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/networking"
	networkingvalidation "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/policy"
	policyvalidation "k8s.io/kubernetes/pkg/apis/policy/validation"
	podsecurityapi "k8s.io/pod-security-admission/api"
	podsecurity "k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"

	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	_ "k8s.io/kubernetes/pkg/apis/autoscaling/install"
	_ "k8s.io/kubernetes/pkg/apis/batch/install"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
)

// Helm renders without a namespace; an API server would put this one in.
const namespace = "default"

// check returns the name of an object, and what is wrong with it.
func check(document []byte, kinds customKinds) (string, []string) {
	var head struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
	}
	if err := yaml.Unmarshal(document, &head); err != nil {
		return "a document", []string{err.Error()}
	}
	if head.Kind == "" && head.APIVersion == "" {
		return "", nil
	}
	name := head.Kind + " " + head.Name
	if kind, known := kinds[head.TypeMeta]; known {
		return name, append(kind.check(document), checkGroupPods(document)...)
	}
	if head.TypeMeta == (metav1.TypeMeta{APIVersion: monitoring.SchemeGroupVersion.String(), Kind: monitoring.ServiceMonitorsKind}) {
		return name, checkServiceMonitor(document)
	}
	return name, checkBuiltIn(document, head.TypeMeta)
}

// checkGroupPods judges the pods of a LeaderWorkerSet as if each were a Deployment's. Other kinds have
// none.
func checkGroupPods(document []byte) []string {
	var group struct {
		Spec struct {
			LeaderWorkerTemplate struct {
				LeaderTemplate *corev1.PodTemplateSpec `json:"leaderTemplate"`
				WorkerTemplate *corev1.PodTemplateSpec `json:"workerTemplate"`
			} `json:"leaderWorkerTemplate"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(document, &group); err != nil {
		return []string{err.Error()}
	}
	var complaints []string
	for _, pod := range []*corev1.PodTemplateSpec{group.Spec.LeaderWorkerTemplate.LeaderTemplate, group.Spec.LeaderWorkerTemplate.WorkerTemplate} {
		if pod == nil {
			continue
		}
		deployment := appsv1.Deployment{
			TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"},
			ObjectMeta: metav1.ObjectMeta{Name: "pods"},
			Spec:       appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: pod.Labels}, Template: *pod},
		}
		text, err := yaml.Marshal(deployment)
		if err != nil {
			return []string{err.Error()}
		}
		complaints = append(complaints, checkBuiltIn(text, deployment.TypeMeta)...)
	}
	return complaints
}

// checkServiceMonitor knows the types alone: the module has them without their definition's schema.
func checkServiceMonitor(document []byte) []string {
	var monitor monitoring.ServiceMonitor
	if err := yaml.UnmarshalStrict(document, &monitor); err != nil {
		return []string{err.Error()}
	}
	return nil
}

func checkBuiltIn(document []byte, head metav1.TypeMeta) []string {
	external, err := legacyscheme.Scheme.New(head.GroupVersionKind())
	if err != nil {
		return []string{err.Error()}
	}
	if err := yaml.UnmarshalStrict(document, external); err != nil {
		return []string{err.Error()}
	}
	legacyscheme.Scheme.Default(external)
	internal, err := legacyscheme.Scheme.UnsafeConvertToVersion(external, runtime.InternalGroupVersioner)
	if err != nil {
		return []string{err.Error()}
	}
	var complaints []string
	for _, err := range validate(internal) {
		complaints = append(complaints, err.Error())
	}
	return append(complaints, checkPod(external)...)
}

// validate is what the API server validates when the object is made.
func validate(object runtime.Object) field.ErrorList {
	options := corevalidation.PodValidationOptions{}
	switch object := object.(type) {
	case *apps.Deployment:
		object.Namespace = namespace
		return appsvalidation.ValidateDeployment(object, options)
	case *core.Service:
		object.Namespace = namespace
		if object.Spec.ClusterIP != "" {
			object.Spec.ClusterIPs = []string{object.Spec.ClusterIP} // as the server does first
		}
		return corevalidation.ValidateServiceCreate(object)
	case *policy.PodDisruptionBudget:
		object.Namespace = namespace
		return policyvalidation.ValidatePodDisruptionBudget(object, policyvalidation.PodDisruptionBudgetValidationOptions{})
	case *networking.NetworkPolicy:
		object.Namespace = namespace
		return networkingvalidation.ValidateNetworkPolicy(object, networkingvalidation.NetworkPolicyValidationOptions{})
	case *autoscaling.HorizontalPodAutoscaler:
		object.Namespace = namespace
		options := autoscalingvalidation.HorizontalPodAutoscalerSpecValidationOptions{MinReplicasLowerBound: 1}
		return autoscalingvalidation.ValidateHorizontalPodAutoscaler(object, options)
	case *batch.Job:
		// Its selector is made by the server; what is ours is the pod.
		return corevalidation.ValidatePodTemplateSpec(&object.Spec.Template, field.NewPath("spec", "template"), options)
	case *core.PersistentVolumeClaim:
		object.Namespace = namespace
		return corevalidation.ValidatePersistentVolumeClaim(object, corevalidation.PersistentVolumeClaimSpecValidationOptions{})
	default:
		return field.ErrorList{field.InternalError(nil, fmt.Errorf("%T is not known here", object))}
	}
}

// checkPod holds an object's pod, if it has one, to the standard "restricted".
func checkPod(object runtime.Object) []string {
	var pod *corev1.PodTemplateSpec
	switch object := object.(type) {
	case *appsv1.Deployment:
		pod = &object.Spec.Template
	case *batchv1.Job:
		pod = &object.Spec.Template
	default:
		return nil
	}
	evaluator, err := podsecurity.NewEvaluator(podsecurity.DefaultChecks(), nil)
	if err != nil {
		return []string{err.Error()}
	}
	restricted := podsecurityapi.LevelVersion{Level: podsecurityapi.LevelRestricted, Version: podsecurityapi.LatestVersion()}
	result := podsecurity.AggregateCheckResults(evaluator.EvaluatePod(restricted, &pod.ObjectMeta, &pod.Spec))
	if result.Allowed {
		return nil
	}
	return []string{"restricted pods: " + result.ForbiddenDetail()}
}
