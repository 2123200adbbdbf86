// Runs a command with a Kubernetes API server of its own: etcd, kube-apiserver and kube-controller-manager on loopback,
// without nodes. The command has KUBECONFIG, and kubectl in its PATH. All of it ends with the command.
//
// The program is each of the servers, by the name that it is called by.
package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

// Time for a server to start on a busy machine.
const startTimeout = 120 * time.Second

func main() {
	switch filepath.Base(os.Args[0]) {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kubectl":
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	default:
		code, err := withCluster(os.Args[1:])
		if err != nil {
			fmt.Fprintf(os.Stderr, "error: %v\n", err)
			code = 2
		}
		os.Exit(code)
	}
}

// cluster has the files and the processes of the servers.
type cluster struct {
	folder   string
	servers  []*exec.Cmd
	ended    chan string
	signals  chan os.Signal
	token    string
	etcd     string
	endpoint string
}

// withCluster starts the servers, runs a command and returns its exit code.
func withCluster(command []string) (int, error) {
	if len(command) == 0 {
		return 0, errors.New("usage: with-cluster COMMAND [ARGUMENT]")
	}
	// The servers end with the thread that has started them.
	runtime.LockOSThread()
	folder, err := os.MkdirTemp("", "skysail-cluster-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(folder)
	of := &cluster{folder: folder, ended: make(chan string, 8), signals: make(chan os.Signal, 1)}
	defer of.stop()
	signal.Notify(of.signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	if err := of.start(); err != nil {
		return 0, fmt.Errorf("%w\n%s", err, of.logs())
	}
	return of.run(command)
}

// run runs the command, which gets the signals.
func (of *cluster) run(command []string) (int, error) {
	child := exec.Command(command[0], command[1:]...)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	path := of.path("bin") + string(os.PathListSeparator) + os.Getenv("PATH")
	child.Env = append(os.Environ(), "KUBECONFIG="+of.path("kubeconfig"), "PATH="+path)
	if err := child.Start(); err != nil {
		return 0, err
	}
	go func() {
		for received := range of.signals {
			_ = child.Process.Signal(received)
		}
	}()
	err := child.Wait()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		if code := failed.ExitCode(); code >= 0 {
			return code, nil
		}
		return 1, nil
	}
	return 0, err
}

// start starts the servers, each after those that it needs.
func (of *cluster) start() error {
	if err := of.prepare(); err != nil {
		return err
	}
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	of.etcd = "http://127.0.0.1:" + ports[0]
	of.endpoint = "https://127.0.0.1:" + ports[2]
	peer := "http://127.0.0.1:" + ports[1]
	// What is written need not survive.
	if err := of.serve("etcd", "--data-dir", of.path("data"), "--unsafe-no-fsync", "--log-level", "error",
		"--listen-client-urls", of.etcd, "--advertise-client-urls", of.etcd,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer); err != nil {
		return err
	}
	if err := of.until("etcd", of.etcd+"/health"); err != nil {
		return err
	}
	if err := of.serve("kube-apiserver", "--etcd-servers", of.etcd, "--cert-dir", of.folder,
		"--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", ports[2],
		// A loopback address cannot be that of the Service kubernetes.
		"--endpoint-reconciler-type", "none", "--service-cluster-ip-range", "10.96.0.0/16",
		"--token-auth-file", of.path("tokens"), "--authorization-mode", "RBAC",
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", of.path("accounts.key"),
		"--service-account-signing-key-file", of.path("accounts.key")); err != nil {
		return err
	}
	if err := of.until("kube-apiserver", of.endpoint+"/readyz"); err != nil {
		return err
	}
	if err := of.writeConfig(); err != nil {
		return err
	}
	if err := of.serve("kube-controller-manager", "--kubeconfig", of.path("kubeconfig"), "--secure-port", "0",
		"--leader-elect=false", "--root-ca-file", of.path("apiserver.crt"),
		"--service-account-private-key-file", of.path("accounts.key")); err != nil {
		return err
	}
	return of.until("kube-controller-manager", of.endpoint+"/api/v1/namespaces/default/serviceaccounts/default")
}

// prepare makes the programs' links, the token of the administrator and the key of service accounts.
func (of *cluster) prepare() error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.Mkdir(of.path("bin"), 0o700); err != nil {
		return err
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kubectl"} {
		if err := os.Symlink(program, of.path("bin", name)); err != nil {
			return err
		}
	}
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		return err
	}
	of.token = hex.EncodeToString(random)
	line := of.token + ",admin,admin,system:masters\n"
	if err := os.WriteFile(of.path("tokens"), []byte(line), 0o600); err != nil {
		return err
	}
	// As in most clusters.
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	encoded := x509.MarshalPKCS1PrivateKey(key)
	block := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: encoded})
	return os.WriteFile(of.path("accounts.key"), block, 0o600)
}

// writeConfig writes the kubeconfig. The server's certificate file also has the certificate that signed it.
func (of *cluster) writeConfig() error {
	roots, err := os.ReadFile(of.path("apiserver.crt"))
	if err != nil {
		return err
	}
	config := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{ name: test, context: { cluster: test, user: admin } }]
clusters: [{ name: test, cluster: { server: %q, certificate-authority-data: %q } }]
users: [{ name: admin, user: { token: %q } }]
`, of.endpoint, base64.StdEncoding.EncodeToString(roots), of.token)
	return os.WriteFile(of.path("kubeconfig"), []byte(config), 0o600)
}

// serve starts a server. It ends with this program in any case.
func (of *cluster) serve(name string, arguments ...string) error {
	log, err := os.Create(of.path(name + ".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	server := exec.Command(of.path("bin", name), arguments...)
	server.Stdout, server.Stderr = log, log
	// A group of its own: Ctrl-C in a terminal ends the command first.
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := server.Start(); err != nil {
		return err
	}
	of.servers = append(of.servers, server)
	go func() {
		_ = server.Wait()
		of.ended <- name
	}()
	return nil
}

// until waits until a server answers a request with success.
func (of *cluster) until(name, url string) error {
	// The certificate is made at the start of the server, which is a process of this program.
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	end := time.Now().Add(startTimeout)
	for time.Now().Before(end) {
		select {
		case server := <-of.ended:
			of.ended <- server
			return fmt.Errorf("%s has ended", server)
		case received := <-of.signals:
			return fmt.Errorf("%v before %s served", received, name)
		case <-time.After(100 * time.Millisecond):
		}
		request, err := http.NewRequest(http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+of.token)
		if response, err := client.Do(request); err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
		}
	}
	return fmt.Errorf("%s does not serve after %v", name, startTimeout)
}

// stop ends the servers, the last one first. Each has a line in the channel when it has ended.
func (of *cluster) stop() {
	for index := len(of.servers) - 1; index >= 0; index-- {
		_ = of.servers[index].Process.Kill()
	}
	end := time.After(10 * time.Second)
	for range of.servers {
		select {
		case <-of.ended:
		case <-end:
			return
		}
	}
}

// logs returns the ends of the logs.
func (of *cluster) logs() string {
	var text strings.Builder
	files, _ := filepath.Glob(of.path("*.log"))
	for _, file := range files {
		content, _ := os.ReadFile(file)
		lines := strings.Split(strings.TrimSpace(string(content)), "\n")
		fmt.Fprintf(&text, "%s:\n%s\n", filepath.Base(file), strings.Join(lines[max(0, len(lines)-10):], "\n"))
	}
	return text.String()
}

func (of *cluster) path(names ...string) string {
	return filepath.Join(append([]string{of.folder}, names...)...)
}

// freePorts returns ports of loopback that are free now.
func freePorts(count int) ([]string, error) {
	var ports []string
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer listener.Close()
		_, port, err := net.SplitHostPort(listener.Addr().String())
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
	}
	return ports, nil
}
