// Command grpc is both ends of a call for tests/grpc.rs: a server that says who it is, and a client that takes its
// configuration from a control plane by itself (xDS).
//
//	grpc serve ADDRESS NAME [FOLDER]   serves gRPC's health service and reflection; says where on standard output
//	grpc call                          reads what to call from standard input, a line of JSON each, and answers in lines of JSON
//
// A server named alpha has reflection of version v1alpha alone. With a folder, the server shows the certificate in it and asks its clients for one.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/credentials/xds"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	_ "google.golang.org/grpc/xds"
)

// By this header an answer says which server it is from.
const servedBy = "served-by"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 3 && args[0] == "serve":
		return serve(args[1], args[2], insecure.NewCredentials())
	case len(args) == 4 && args[0] == "serve":
		own, err := mutual(args[3])
		if err != nil {
			return err
		}
		return serve(args[1], args[2], own)
	case len(args) == 1 && args[0] == "call":
		return answerAll()
	default:
		return fmt.Errorf("usage: grpc serve ADDRESS NAME [FOLDER] | grpc call")
	}
}

// serve answers until the process is ended.
func serve(address, name string, own credentials.TransportCredentials) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	intercept := func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		// A failure with headers would not be retried.
		if err := behave(ctx); err != nil {
			return nil, err
		}
		if err := grpc.SetHeader(ctx, metadata.Pairs(servedBy, name)); err != nil {
			return nil, err
		}
		return next(ctx, request)
	}
	server := grpc.NewServer(grpc.Creds(own), grpc.UnaryInterceptor(intercept))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	if name == "alpha" {
		grpc_reflection_v1alpha.RegisterServerReflectionServer(server, reflection.NewServer(reflection.ServerOptions{Services: server}))
	} else {
		reflection.Register(server)
	}
	fmt.Println(listener.Addr())
	return server.Serve(listener)
}

// mutual is TLS with the certificate and the roots in a folder.
func mutual(folder string) (credentials.TransportCredentials, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(folder, "cert.pem"), filepath.Join(folder, "key.pem"))
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(folder, "root.pem"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	return credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{pair},
		ClientCAs:    roots,
		ClientAuth:   tls.RequireAndVerifyClientCert,
	}), nil
}

// behave does what the caller asks for by the header "please".
func behave(ctx context.Context) error {
	incoming, _ := metadata.FromIncomingContext(ctx)
	for _, wish := range incoming.Get("please") {
		switch wish {
		case "hang":
			<-ctx.Done()
			return ctx.Err()
		case "fail-once":
			if len(incoming.Get("grpc-previous-rpc-attempts")) == 0 {
				return status.Error(codes.Unavailable, "this was the first attempt")
			}
		}
	}
	return nil
}

// order is what to call.
type order struct {
	Target  string            `json:"target"`
	Calls   int               `json:"calls"`
	Headers map[string]string `json:"headers"`
	// The longest time for each call.
	Seconds int `json:"seconds"`
}

// outcome is what came of the calls: how many each server answered, and how many failed, by status.
type outcome struct {
	Answers map[string]int `json:"answers"`
	Errors  map[string]int `json:"errors"`
	Millis  int64          `json:"millis"`
}

// answerAll keeps its connections, and with them what it knows of the mesh, until its input ends.
func answerAll() error {
	// The mesh says where TLS is spoken.
	own, err := xds.NewClientCredentials(xds.ClientOptions{FallbackCreds: insecure.NewCredentials()})
	if err != nil {
		return err
	}
	connections := map[string]*grpc.ClientConn{}
	input, output := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for input.Scan() {
		var wanted order
		if err := json.Unmarshal(input.Bytes(), &wanted); err != nil {
			return err
		}
		connection := connections[wanted.Target]
		if connection == nil {
			var err error
			connection, err = grpc.NewClient(wanted.Target, grpc.WithTransportCredentials(own))
			if err != nil {
				return err
			}
			connections[wanted.Target] = connection
		}
		if err := output.Encode(callAll(connection, wanted)); err != nil {
			return err
		}
	}
	return input.Err()
}

func callAll(connection *grpc.ClientConn, wanted order) outcome {
	made := outcome{Answers: map[string]int{}, Errors: map[string]int{}}
	client := grpc_health_v1.NewHealthClient(connection)
	start := time.Now()
	for range wanted.Calls {
		server, err := call(client, wanted)
		if err != nil {
			made.Errors[fmt.Sprintf("%s: %s", status.Code(err), status.Convert(err).Message())]++
			continue
		}
		made.Answers[server]++
	}
	made.Millis = time.Since(start).Milliseconds()
	return made
}

// call gives the name of the server that answered.
func call(client grpc_health_v1.HealthClient, wanted order) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(wanted.Seconds)*time.Second)
	defer cancel()
	ctx = metadata.NewOutgoingContext(ctx, metadata.New(wanted.Headers))
	var header metadata.MD
	if _, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.Header(&header)); err != nil {
		return "", err
	}
	names := header.Get(servedBy)
	if len(names) != 1 {
		return "", fmt.Errorf("the answer has the header %s %d times", servedBy, len(names))
	}
	return names[0], nil
}
