// Does what ../lua does, with Argo CD's own code: `persist-argo health|discovery|action SCRIPT`, with resources as JSON, one after another,
// on standard input, and for each one line with what Argo CD makes of it. `make argo` builds it, which takes minutes.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/argoproj/argo-cd/v3/util/lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(mode, path string, in io.Reader, out io.Writer) error {
	script, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	decoder, encoder := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var raw json.RawMessage
		if err := decoder.Decode(&raw); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		resource := &unstructured.Unstructured{}
		if err := resource.UnmarshalJSON(raw); err != nil {
			return err
		}
		answer, err := answer(mode, string(script), resource)
		if err != nil {
			return err
		}
		if err := encoder.Encode(answer); err != nil {
			return err
		}
	}
}

func answer(mode, script string, resource *unstructured.Unstructured) (any, error) {
	switch mode {
	case "health":
		return lua.VM{}.ExecuteHealthLua(resource, script)
	case "discovery":
		actions, err := lua.VM{}.ExecuteResourceActionDiscovery(resource, []string{script})
		if err != nil {
			return nil, err
		}
		found := map[string]any{}
		for _, action := range actions {
			found[action.Name] = map[string]any{"disabled": action.Disabled}
		}
		return found, nil
	case "action":
		impacted, err := lua.VM{}.ExecuteResourceAction(resource, script, nil)
		if err != nil {
			return nil, err
		}
		return impacted[0].UnstructuredObj, nil
	}
	return nil, fmt.Errorf("unknown mode %s", mode)
}
