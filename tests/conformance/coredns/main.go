// CoreDNS with the plugins that the suite's UDP backend names; the full program links the SDKs of three clouds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/whoami"
)

func main() {
	// The order in which a query passes them.
	dnsserver.Directives = []string{"errors", "log", "forward", "whoami"}
	coremain.Run()
}
