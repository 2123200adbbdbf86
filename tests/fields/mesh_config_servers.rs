//! MeshConfig: settings of the servers' proxies, as their clients see them.

use std::sync::Arc;

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, crypto::aws_lc_rs::default_provider,
    pki_types::ServerName, version::TLS12,
};
use skysail_testkit::{Mesh, eventually};

use crate::{check, get, log, mesh_config_collector::Collector, mesh_with, wait};

const RULES: &str = include_str!("mesh_config_servers.yaml");
/// Clients, servers and their workloads; the proxies of each are of one kind.
const PAIRS: [(&str, &str, &str); 2] = [("by-skysail", "ours", "api-v1"), ("by-envoy", "theirs", "api-v2")];

#[test]
fn servers_follow_the_mesh() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    let _collectors = PAIRS.map(|(_, _, workload)| Collector::start(&mesh, workload));
    for (client, server, workload) in PAIRS {
        wait(&mesh, client, &get(&format!("http://{server}/"), 200, &["\"pod\""]));
        let page = |path: &str| mesh.call(workload, &format!("http://127.0.0.1:{path}"), &[]).body;
        let info = page("15000/server_info");
        assert!(info.contains("\"concurrency\":3") || info.contains("\"concurrency\": 3"), "{info}");
        // The name is one of an Envoy.
        let metrics = page("15090/stats/prometheus");
        assert!(server == "ours" || metrics.contains("own-inbound-80"), "{workload}: {metrics}");
        details(&mesh, workload, true);
    }
    tls(&mesh);
    local(&mesh);
    detection(&mesh);
    unmatched(&mesh);
    mesh.edit("rules.yaml", "{dns: true}", "{dns: false}");
    PAIRS.iter().for_each(|(_, _, workload)| details(&mesh, workload, false));
}

/// Certificates of the mesh have no DNS names, so the configuration of the proxy shows whether they would be told.
fn details(mesh: &Mesh, workload: &str, has_dns: bool) {
    eventually(&format!("{workload} tells DNS names: {has_dns}"), || {
        let dump = mesh.call(workload, "http://127.0.0.1:15000/config_dump", &[]).body;
        let dump: String = dump.chars().filter(|letter| !letter.is_whitespace()).collect();
        let details = dump.split("\"set_current_client_cert_details\":{").nth(1).unwrap_or_default();
        let details = details.split("\"}").next().unwrap_or_default();
        let told = details.get(..80).unwrap_or(details).contains("\"dns\":true");
        if told == has_dns { Ok(()) } else { Err(details.to_owned()) }
    });
}

/// Returns the first bytes that a server answers to a client of TLS 1.2.
fn hello(mesh: &Mesh, server: &str) -> Vec<u8> {
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_protocol_versions(&[&TLS12]).unwrap();
    let mut config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    config.alpn_protocols = vec![b"istio".to_vec()];
    let name = ServerName::try_from("server.example").unwrap();
    let mut session = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    session.write_tls(&mut hello).unwrap();
    let escaped: String = hello.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    let script =
        format!("exec 3<>/dev/tcp/{server}/80; printf '{escaped}' >&3; head -c 79 <&3 | od -An -v -tx1");
    let output = mesh.run(&["exec", "plain-one", "--", "bash", "-c", &script]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn tls(mesh: &Mesh) {
    for (_, server, _) in PAIRS {
        let hello = hello(mesh, server);
        // A record with ServerHello: its version, 32 random bytes, the session's id and the suite.
        assert_eq!(hello[0], 0x16, "{server}: {hello:02x?}");
        let suite = 44 + usize::from(hello[43]);
        assert_eq!(hello[suite..suite + 2], [0xc0, 0x2b], "{server}: {hello:02x?}");
    }
    mesh.edit("rules.yaml", "minProtocolVersion: TLSV1_2", "minProtocolVersion: TLSV1_3");
    for (client, server, _) in PAIRS {
        eventually(&format!("{server} refuses TLS 1.2"), || {
            let hello = hello(mesh, server);
            // An alert about the version.
            if hello.first() == Some(&0x15) && hello.get(6) == Some(&70) {
                Ok(())
            } else {
                Err(format!("{hello:02x?}"))
            }
        });
        check(mesh, &[client], &[get(&format!("http://{server}/"), 200, &["\"caller\":\"spiffe://"])]);
    }
    // The field makes the whole configuration invalid, as in Istio.
    mesh.edit("rules.yaml", "cipherSuites: [", "ecdhCurves: [P-384], cipherSuites: [");
    mesh.wait_for_output("meshMTLS.ecdhCurves: is not supported");
    mesh.edit("rules.yaml", "ecdhCurves: [P-384], ", "");
}

/// A server that listens on loopback alone.
fn local(mesh: &Mesh) {
    for (client, server, _) in PAIRS {
        check(mesh, &[client], &[get(&format!("http://{server}:81/"), 503, &[])]);
    }
    mesh.edit("rules.yaml", "mode: PASSTHROUGH", "mode: LOCALHOST");
    for (client, server, _) in PAIRS {
        wait(mesh, client, &get(&format!("http://{server}:81/"), 200, &["raw"]));
    }
    mesh.edit("rules.yaml", "mode: LOCALHOST", "mode: PASSTHROUGH");
    for (client, server, _) in PAIRS {
        wait(mesh, client, &get(&format!("http://{server}:81/"), 503, &[]));
    }
}

/// A server that speaks first is heard once the proxies no longer wait for the client.
fn detection(mesh: &Mesh) {
    let heard = |client: &str, server: &str| {
        let script = format!("exec 3<>/dev/tcp/{server}/90; read -r -t 4 -u 3 line; echo \"heard $line\"");
        let output = mesh.run(&["exec", client, "--", "bash", "-c", &script]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for (is_limited, (client, server, _)) in
        [true, false].into_iter().flat_map(|is| PAIRS.map(|pair| (is, pair)))
    {
        if !is_limited {
            mesh.edit("rules.yaml", "protocolDetectionTimeout:", "# protocolDetectionTimeout:");
        }
        eventually(&format!("{client} hears {server}: {is_limited}"), || {
            let heard = heard(client, server);
            if heard.contains("HTTP/1.1 200") == is_limited { Ok(()) } else { Err(heard) }
        });
        if !is_limited {
            mesh.edit("rules.yaml", "# protocolDetectionTimeout:", "protocolDetectionTimeout:");
        }
    }
}

/// Connections of plain text match no filter chain. The first client's leave no entry, the second's do.
fn unmatched(mesh: &Mesh) {
    let address = |pod: &str| {
        let status = mesh.status();
        let pods = status["pods"].as_array().unwrap().clone();
        let pod = pods.into_iter().find(|one| one["name"] == pod).unwrap();
        format!(" {}:", pod["address"].as_str().unwrap())
    };
    for (_, server, _) in PAIRS {
        assert_eq!(mesh.call("plain-one", &format!("http://{server}/"), &[]).status, None);
    }
    mesh.edit("rules.yaml", "disableEnvoyListenerLog: true", "disableEnvoyListenerLog: false");
    for (_, server, workload) in PAIRS {
        let log = eventually("a connection is logged", || {
            let answer = mesh.call("plain-two", &format!("http://{server}/"), &[]);
            let log = log(mesh, &[workload, "-c", "proxy"]);
            let of_second =
                log.lines().any(|line| line.contains(" NR ") && line.contains(&address("plain-two")));
            if of_second { Ok(log) } else { Err(format!("{answer:?} {log}")) }
        });
        let of_first = log.lines().any(|line| line.contains(" NR ") && line.contains(&address("plain-one")));
        assert!(!of_first, "{workload}: {log}");
    }
}
