//! ServiceEntry, and the localities of endpoints.

use skysail_testkit::Mesh;

use crate::{CLIENTS, OF_SOCKET, ask, balancing::pods, check, get, mesh_with, serve_socket, wait};

const ENTRIES: &str = include_str!("entries.yaml");
const LOCALITIES: &str = include_str!("localities.yaml");
const V1: &[&str] = &["\"version\":\"v1\""];
const V2: &[&str] = &["\"version\":\"v2\""];

/// A host whose server listens at a socket in FOLDER.
const AT_SOCKET: &str = "
apiVersion: networking.istio.io/v1beta1
kind: ServiceEntry
metadata: {name: at-socket, namespace: shop}
spec:
  hosts: [at-socket.example.com]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 'unix://FOLDER/server'}]
";

/// Starts the mesh, then adds objects with the addresses of its pods.
fn start(objects: &str) -> Mesh {
    let mesh = mesh_with("", &["shop/by-envoy"]).ready();
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let address = |workload: &str| {
        let pod = pods.iter().find(|pod| pod["workload"] == workload).unwrap();
        pod["address"].as_str().unwrap().to_owned()
    };
    mesh.put("rules.yaml", &objects.replace("V1", &address("api-v1")).replace("V2", &address("api-v2")));
    mesh
}

#[test]
fn entries_add_hosts() {
    let mesh = start(ENTRIES);
    let folder = tempfile::tempdir().unwrap();
    serve_socket(&folder.path().join("server"));
    mesh.put("socket.yaml", &AT_SOCKET.replace("FOLDER", &folder.path().to_string_lossy()));
    for client in CLIENTS {
        wait(&mesh, client, &get("http://at-socket.example.com/", 200, &[OF_SOCKET]));
        wait(&mesh, client, &get("http://static.example.com/green", 200, V2));
        wait(&mesh, client, &get("http://internal.example.com:8000/", 200, V1));
        wait(&mesh, client, &get("http://addressed.example.com:9000/", 200, V2));
        assert_eq!(pods(&mesh, client, "http://static.example.com/", &[], 20).len(), 2);
    }
    let caller = &["\"caller\":\"spiffe://cluster.local/ns/shop/sa/buyer\""];
    let cases = [
        get("http://static.example.com/", 200, &["\"caller\":null"]),
        get("http://internal.example.com:8000/", 200, caller),
        get("http://240.1.1.1:9000/", 200, V2),
        get("http://240.1.2.7:9000/", 200, V2),
    ];
    check(&mesh, &CLIENTS, &cases);
    for client in CLIENTS {
        // The certificate of the endpoint has another name.
        wait(&mesh, client, &get("http://other-identity.example.com/", 503, &["upstream connect error"]));
        let found = pods(&mesh, client, "http://weighted.example.com/", &[], 20);
        let heavy = found
            .iter()
            .filter(|(name, _)| name.starts_with("api-v2"))
            .map(|(_, count)| *count)
            .sum::<usize>();
        assert!(heavy >= 15, "{client}: {found:?}");
        let private = ask(&mesh, client, &get("http://240.1.1.2/", 200, &[]));
        assert!(private.is_err(), "{client}");
    }
    wait(&mesh, "outsider", &get("http://240.1.1.2/", 200, V1));
}

#[test]
fn near_endpoints_are_preferred() {
    let mesh = start(LOCALITIES);
    for client in CLIENTS {
        for host in ["nearest", "shares", "failing-over", "preferring", "zones"] {
            let url = format!("http://{host}.example.com/");
            wait(&mesh, client, &get(&url, 200, V2));
            let found = pods(&mesh, client, &url, &[], 10);
            assert!(
                found.len() == 1 && found.keys().all(|name| name.starts_with("api-v2")),
                "{client} {url}: {found:?}"
            );
        }
        wait(&mesh, client, &get("http://anywhere.example.com/", 200, &[]));
        assert_eq!(pods(&mesh, client, "http://anywhere.example.com/", &[], 40).len(), 2, "{client}");
    }
}
