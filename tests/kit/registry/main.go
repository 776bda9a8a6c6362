// A registry of images and charts for tests: `persist-registry ADDRESS FOLDER [CERTIFICATE KEY]`. Blobs lie in FOLDER, manifests in memory.
// With a certificate it speaks TLS. It knows referrers, by which cosign and Flux find signatures.
package main

import (
	"fmt"
	"net/http"
	"os"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(words []string) error {
	if len(words) != 2 && len(words) != 4 {
		return fmt.Errorf("usage: persist-registry ADDRESS FOLDER [CERTIFICATE KEY]")
	}
	blobs := registry.NewDiskBlobHandler(words[1])
	handler := registry.New(registry.WithBlobHandler(blobs), registry.WithReferrersSupport(true))
	if len(words) == 2 {
		return http.ListenAndServe(words[0], handler)
	}
	return http.ListenAndServeTLS(words[0], words[2], words[3], handler)
}
