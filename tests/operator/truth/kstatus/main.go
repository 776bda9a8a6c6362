// Reads Kubernetes resources as JSON, one after another, on standard input, and writes for each what kstatus, by which GitOps tools
// wait, makes of it: one line {"status": ..., "message": ...}.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	if err := answer(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func answer(in io.Reader, out io.Writer) error {
	decoder, encoder := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var raw json.RawMessage
		if err := decoder.Decode(&raw); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		// UnmarshalJSON, not json.Unmarshal into Object: kstatus wants generations as int64.
		resource := &unstructured.Unstructured{}
		if err := resource.UnmarshalJSON(raw); err != nil {
			return err
		}
		result, err := status.Compute(resource)
		if err != nil {
			return err
		}
		line := map[string]string{"status": string(result.Status), "message": result.Message}
		if err := encoder.Encode(line); err != nil {
			return err
		}
	}
}
