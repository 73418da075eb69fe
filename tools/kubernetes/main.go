// Command kubernetes judges the objects that a chart renders, as far as that goes without a
// cluster, in the order in which an API server would.
//
//	helm template ... | kubernetes [FILE of a CustomResourceDefinition]...
//
// Objects of Kubernetes are decoded into the types of their API, where a field that is unknown or
// stands twice is an error, then defaulted and validated by the API server's own code, and their
// pods are held to the Pod Security Standard "restricted". Objects of other kinds are held to the
// schema of their definition, and a ServiceMonitor to its types. Each complaint is a line on standard output; the exit code is 1 if
// there is any.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/util/yaml"
)

func main() {
	kinds := customKinds{}
	for _, path := range os.Args[1:] {
		if err := kinds.read(path); err != nil {
			fail(err)
		}
	}
	complaints, objects, err := judge(os.Stdin, kinds)
	if err != nil {
		fail(err)
	}
	for _, complaint := range complaints {
		fmt.Println(complaint)
	}
	if len(complaints) > 0 {
		os.Exit(1)
	}
	fmt.Printf("%d objects are valid\n", objects)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "kubernetes:", err)
	os.Exit(2)
}

// judge reads YAML documents and returns what is wrong with them, and how many there were.
func judge(input io.Reader, kinds customKinds) (complaints []string, objects int, err error) {
	documents := yaml.NewYAMLReader(bufio.NewReader(input))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return complaints, objects, nil
		}
		if err != nil {
			return nil, 0, err
		}
		name, found := check(document, kinds)
		if name == "" && len(found) == 0 {
			continue // a document of comments alone
		}
		objects++
		for _, complaint := range found {
			complaints = append(complaints, name+": "+complaint)
		}
	}
}
