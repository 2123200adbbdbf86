// Gives the simulator the resources of a control plane of Skysail. Added to package simulation of a copy of Istio.
//
// Each simulation starts `skysail control` with the objects of the test, and asks it over xDS as the test's proxy.
// SKYSAIL is the path of the program.

package simulation

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cluster "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	envoycore "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listener "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	route "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	kubeyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	meshconfig "istio.io/api/mesh/v1alpha1"
	"istio.io/istio/pilot/pkg/config/kube/crd"
	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pilot/pkg/networking/core"
	v3 "istio.io/istio/pilot/pkg/xds/v3"
	"istio.io/istio/pilot/test/xds"
	"istio.io/istio/pkg/config"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/util/protomarshal"
)

// Limit of the time for one simulation.
const timeout = 2 * time.Minute

// Name of the proxy's pod.
const podName = "app"

// NewSimulation stands before the function of Istio.
func NewSimulation(t *testing.T, s *xds.FakeDiscoveryServer, proxy *model.Proxy) *Simulation {
	t.Helper()
	o := xds.GivenOptions(s)
	if len(o.KubernetesObjects)+len(o.KubernetesObjectsByCluster)+len(o.KubernetesObjectStringByCluster)+
		len(o.Services)+len(o.Gateways) > 0 || o.NetworksWatcher != nil || o.ConfigTemplateInput != nil {
		t.Fatal("harness: this test gives objects in a form that the harness does not read")
	}
	var given objects
	given.text(t, o.KubernetesObjectString)
	given.text(t, o.ConfigString)
	given.configs(t, o.Configs)
	given.mesh(t, o.MeshConfig)
	return ask(t, given, proxy)
}

// NewSimulationFromConfigGen stands before the function of Istio.
func NewSimulationFromConfigGen(t *testing.T, s *core.ConfigGenTest, proxy *model.Proxy) *Simulation {
	t.Helper()
	o := core.GivenOptions(s)
	if len(o.ConfigPointers)+len(o.Gateways)+len(o.ServiceRegistries) > 0 || o.NetworksWatcher != nil ||
		o.ConfigTemplateInput != nil {
		t.Fatal("harness: this test gives objects in a form that the harness does not read")
	}
	var given objects
	given.text(t, o.ConfigString)
	given.configs(t, o.Configs)
	given.services(t, o.Services, o.Instances)
	given.mesh(t, o.MeshConfig)
	return ask(t, given, proxy)
}

// Objects of a test as YAML documents, in the order in which the test gives them.
type objects struct {
	documents []string
	known     []string
}

// Adds the documents of a text. Some tests give the same objects in two ways: the first one counts.
func (o *objects) text(t *testing.T, text string) {
	t.Helper()
	reader := kubeyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("harness: %v in %s", err, text)
		}
		var object map[string]any
		if err := yaml.Unmarshal(document, &object); err != nil {
			t.Fatalf("harness: %v in %s", err, document)
		}
		if len(object) > 0 {
			o.add(t, object)
		}
	}
}

// Adds an object, with what an API server demands or adds.
func (o *objects) add(t *testing.T, object map[string]any) {
	t.Helper()
	metadata := within(object, "metadata")
	if metadata["namespace"] == nil {
		metadata["namespace"] = "default"
	}
	// Istio's tests give all objects without a time the same one.
	if metadata["creationTimestamp"] == nil {
		metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
	}
	switch object["kind"] {
	case "Service":
		distinguishPorts(object)
	case "EndpointSlice":
		if object["addressType"] == nil {
			object["addressType"] = "IPv4"
		}
	case "VirtualService":
		qualifyHosts(object, fmt.Sprint(".", metadata["namespace"]))
	}
	name := fmt.Sprintf("%v %v/%v", object["kind"], metadata["namespace"], metadata["name"])
	if slices.Contains(o.known, name) {
		return
	}
	document, err := yaml.Marshal(object)
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	o.known = append(o.known, name)
	o.documents = append(o.documents, string(document))
}

// Returns the mapping of this key, which is added if there is none.
func within(object map[string]any, key string) map[string]any {
	found, _ := object[key].(map[string]any)
	if found == nil {
		found = map[string]any{}
		object[key] = found
	}
	return found
}

// Some tests give two ports of a Service the same name. An API server refuses such a Service.
func distinguishPorts(service map[string]any) {
	ports, _ := within(service, "spec")["ports"].([]any)
	known := map[any]bool{}
	for _, port := range ports {
		if port, ok := port.(map[string]any); ok {
			if known[port["name"]] {
				port["name"] = fmt.Sprint(port["name"], "-", port["port"])
			}
			known[port["name"]] = true
		}
	}
}

// Istio's tests have no DNS domain: short names of destinations become NAME.NAMESPACE.
func qualifyHosts(value any, suffix string) {
	switch value := value.(type) {
	case []any:
		for _, one := range value {
			qualifyHosts(one, suffix)
		}
	case map[string]any:
		if destination, ok := value["destination"].(map[string]any); ok {
			if host, ok := destination["host"].(string); ok && !strings.Contains(host, ".") {
				destination["host"] = host + suffix
			}
		}
		for _, one := range value {
			qualifyHosts(one, suffix)
		}
	}
}

// Adds objects that the test has as Go values.
func (o *objects) configs(t *testing.T, configs []config.Config) {
	t.Helper()
	for _, one := range configs {
		object, err := crd.ConvertConfig(one)
		if err != nil {
			t.Fatalf("harness: %v", err)
		}
		document, err := yaml.Marshal(object)
		if err != nil {
			t.Fatalf("harness: %v", err)
		}
		o.text(t, string(document))
	}
}

// Adds services of Istio's registry as Services, and each of their instances as an EndpointSlice.
func (o *objects) services(t *testing.T, services []*model.Service, instances []*model.ServiceInstance) {
	t.Helper()
	for _, service := range services {
		name, rest, _ := strings.Cut(string(service.Hostname), ".")
		namespace, _, _ := strings.Cut(rest, ".")
		ports := []any{}
		for _, port := range service.Ports {
			appProtocol := strings.ToLower(string(port.Protocol))
			ports = append(ports, map[string]any{"name": port.Name, "port": port.Port, "appProtocol": appProtocol})
		}
		o.add(t, map[string]any{
			"apiVersion": "v1", "kind": "Service",
			"metadata": map[string]any{"name": name, "namespace": namespace},
			"spec":     map[string]any{"clusterIP": service.DefaultAddress, "ports": ports},
		})
		for number, of := range instances {
			if of.Service != service {
				continue
			}
			labels := map[string]any{"kubernetes.io/service-name": name}
			o.add(t, map[string]any{
				"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
				"metadata":  map[string]any{"name": fmt.Sprint(name, "-", number), "namespace": namespace, "labels": labels},
				"endpoints": []any{map[string]any{"addresses": of.Endpoint.Addresses}},
				"ports":     []any{map[string]any{"name": of.ServicePort.Name, "port": of.Endpoint.EndpointPort}},
			})
		}
	}
}

// Adds the pod of the proxy, with which an agent of Istio runs too.
func (o *objects) pod(t *testing.T, proxy *model.Proxy) {
	t.Helper()
	labels, addresses := map[string]any{}, []any{}
	for key, value := range proxy.Labels {
		labels[key] = value
	}
	for _, address := range proxy.IPAddresses {
		addresses = append(addresses, map[string]any{"ip": address})
	}
	o.add(t, map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": podName, "namespace": proxy.Metadata.Namespace, "labels": labels},
		"spec":     map[string]any{"containers": []any{map[string]any{"name": "app", "image": "app"}}},
		"status": map[string]any{
			"podIP": proxy.IPAddresses[0], "podIPs": addresses,
			"conditions": []any{map[string]any{"type": "Ready", "status": "True"}},
		},
	})
}

// Adds those settings of the mesh that differ from Istio's defaults.
func (o *objects) mesh(t *testing.T, settings *meshconfig.MeshConfig) {
	t.Helper()
	if settings == nil {
		return
	}
	defaults, err := protomarshal.ToJSONMap(mesh.DefaultMeshConfig())
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	changed, err := protomarshal.ToJSONMap(settings)
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	for key, value := range changed {
		own, _ := json.Marshal(value)
		if usual, _ := json.Marshal(defaults[key]); bytes.Equal(own, usual) {
			delete(changed, key)
		}
	}
	// JSON leaves out the first value of an enumeration.
	if policy := settings.GetOutboundTrafficPolicy(); policy != nil {
		changed["outboundTrafficPolicy"] = map[string]any{"mode": policy.Mode.String()}
	}
	text, err := yaml.Marshal(changed)
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	o.add(t, map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": "istio", "namespace": "istio-system"},
		"data":     map[string]any{"mesh": string(text)},
	})
}

// Returns the resources that a control plane with these objects sends to the proxy.
func ask(t *testing.T, given objects, proxy *model.Proxy) *Simulation {
	t.Helper()
	given.pod(t, proxy)
	folder := t.TempDir()
	text := strings.Join(given.documents, "\n---\n")
	if err := os.WriteFile(filepath.Join(folder, "objects.yaml"), []byte(text), 0o600); err != nil {
		t.Fatalf("harness: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	address, stop := startControl(t, ctx, folder)
	defer stop()
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	defer connection.Close()
	const largest = 64 << 20
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(connection).
		StreamAggregatedResources(ctx, grpc.MaxCallRecvMsgSize(largest))
	if err != nil {
		t.Fatalf("skysail: %v", err)
	}
	client := &client{stream: stream, node: nodeOf(proxy)}
	sim := &Simulation{t: t}
	sim.Clusters = fetch[cluster.Cluster](t, client, v3.ClusterType, nil)
	sim.Listeners = fetch[listener.Listener](t, client, v3.ListenerType, nil)
	names := core.ExtractRoutesFromListeners(sim.Listeners)
	slices.Sort(names)
	if names = slices.Compact(names); len(names) > 0 {
		sim.Routes = fetch[route.RouteConfiguration](t, client, v3.RouteType, names)
	}
	return sim
}

// Starts a control plane. Returns the address of its plain-text port, and what ends it.
func startControl(t *testing.T, ctx context.Context, folder string) (string, func()) {
	t.Helper()
	command := exec.CommandContext(ctx, os.Getenv("SKYSAIL"), "control", "--config", folder, "--listen", "127.0.0.1",
		"--tls-port", "0", "--plain-port", "0", "--admin-port", "0", "--no-dns", "--log-json")
	output, err := command.StderrPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	var findings []string
	address, ended := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(ended)
		lines := bufio.NewScanner(output)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var line struct {
				Level  string
				Fields struct{ Message, Address string }
			}
			if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
				findings = append(findings, lines.Text())
				continue
			}
			if strings.HasPrefix(line.Fields.Message, "serving discovery (plain text") {
				address <- line.Fields.Address
			}
			if line.Level == "ERROR" || line.Level == "WARN" {
				findings = append(findings, line.Level+" "+line.Fields.Message)
			}
		}
	}()
	stop := func() {
		_ = command.Process.Kill()
		<-ended
		_ = command.Wait()
		for _, line := range findings {
			t.Log("skysail: " + line)
		}
	}
	select {
	case found := <-address:
		return found, stop
	case <-ended:
		stop()
		t.Fatal("skysail: the control plane ended before it served discovery")
	}
	panic("not reached: Fatal ends the goroutine")
}

// Returns the node of a proxy as its agent declares it. Istio's tests leave out what its agent takes from the pod.
func nodeOf(proxy *model.Proxy) *envoycore.Node {
	metadata := proxy.Metadata.ToStruct()
	if metadata.Fields == nil {
		metadata.Fields = map[string]*structpb.Value{}
	}
	text := structpb.NewStringValue
	metadata.Fields["NAMESPACE"] = text(proxy.Metadata.Namespace)
	metadata.Fields["INSTANCE_IPS"] = text(strings.Join(proxy.IPAddresses, ","))
	if len(proxy.Labels) > 0 {
		labels := &structpb.Struct{Fields: map[string]*structpb.Value{}}
		for key, value := range proxy.Labels {
			labels.Fields[key] = text(value)
		}
		metadata.Fields["LABELS"] = structpb.NewStructValue(labels)
	}
	domain := proxy.Metadata.Namespace + ".svc.cluster.local"
	id := fmt.Sprintf("%s~%s~%s.%s~%s", proxy.Type, proxy.IPAddresses[0], podName, proxy.Metadata.Namespace, domain)
	return &envoycore.Node{Id: id, Metadata: metadata, Locality: proxy.Locality}
}

type client struct {
	stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesClient
	node   *envoycore.Node
}

// Subscribes to resources, and returns those of the first response.
func fetch[T any, P interface {
	*T
	proto.Message
}](t *testing.T, client *client, kind string, names []string) []*T {
	t.Helper()
	request := &discovery.DiscoveryRequest{Node: client.node, TypeUrl: kind, ResourceNames: names}
	if err := client.stream.Send(request); err != nil {
		t.Fatalf("skysail: %v", err)
	}
	for {
		response, err := client.stream.Recv()
		if err != nil {
			t.Fatalf("skysail: no %s: %v", kind, err)
		}
		if response.TypeUrl != kind {
			continue
		}
		var all []*T
		for _, resource := range response.Resources {
			one := P(new(T))
			if err := resource.UnmarshalTo(one); err != nil {
				t.Fatalf("skysail: %v", err)
			}
			all = append(all, (*T)(one))
		}
		return all
	}
}
