//! Both proxies with an external processor, in front of a server that answers with the request that it got.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{collections::BTreeMap, net::SocketAddr};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{
    either::Either,
    files::{self, bootstrap, cluster, filter, http, listener, to, with},
    processor::processor,
    support::{Client, within},
};

/// Starts a server that answers with the request that it got.
pub(crate) async fn mirror() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut input = Vec::new();
                loop {
                    let Some(length) = whole(&input) else {
                        let mut more = [0; 65536];
                        match stream.read(&mut more).await {
                            Ok(count @ 1..) => input.extend_from_slice(&more[..count]),
                            _ => return,
                        }
                        continue;
                    };
                    let rest = input.split_off(length);
                    let got = std::mem::replace(&mut input, rest);
                    let head =
                        format!("HTTP/1.1 200 OK\r\nx-server: here\r\ncontent-length: {}\r\n\r\n", got.len());
                    if stream.write_all(&[head.as_bytes(), &got].concat()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// Returns the length of the first request, if all of it has arrived.
pub(crate) fn whole(input: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(input);
    let end = text.find("\r\n\r\n")? + 4;
    let head = text[..end].to_ascii_lowercase();
    if head.contains("transfer-encoding: chunked") {
        let last = text[end..]
            .find("\r\n0\r\n")
            .map(|place| place + 2)
            .or(text[end..].starts_with("0\r\n").then_some(0))?;
        return text[end + last..].find("\r\n\r\n").map(|place| end + last + place + 4);
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = end + length.map_or(0, |length| length.parse().unwrap());
    (input.len() >= length).then_some(length)
}

/// Both proxies, with one listener of this configuration of the filter.
pub(crate) async fn both(config: &Value) -> [Either; 2] {
    both_with(config, &to("mirror"), &[]).await
}

pub(crate) async fn both_with(config: &Value, routes: &Value, before: &[Value]) -> [Either; 2] {
    both_at(config, routes, before, &[]).await
}

pub(crate) async fn both_at(config: &Value, routes: &Value, before: &[Value], more: &[Value]) -> [Either; 2] {
    let base = json!({
        "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}}, "message_timeout": "20s"
    });
    let own = filter("http.ext_proc.v3.ExternalProcessor", &with(base, config));
    let filters = [before, &[own]].concat();
    let listeners = [listener("l", &[http(&filters, routes, &json!({}))])];
    let clusters = [cluster("mirror", mirror().await, false), processor().await];
    let text = bootstrap(&listeners, &[&clusters, more].concat());
    let mut admin: Value = serde_json::from_str(&text).unwrap();
    admin["admin"] = json!({"address": files::address(SocketAddr::from(([127, 0, 0, 1], 0)))});
    admin["node"]["cluster"] = "a".into();
    Either::both(&admin.to_string()).await
}

/// Sends a request; returns the head of the response and its content, without what differs between runs.
pub(crate) async fn ask(proxy: &Either, request: &str) -> (String, String) {
    let mut client = Client::new(TcpStream::connect(proxy.listener("l").await).await.unwrap());
    client.send(request).await;
    let (head, body) = within(message(&mut client)).await;
    (normal(&head), normal(&whole_body(body)))
}

/// Reads a response, in chunks or of its content-length.
pub(crate) async fn message(client: &mut Client) -> (String, String) {
    let head = client.head().await;
    if !head.contains("transfer-encoding: chunked") {
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let body = client.exactly(length.map_or(0, |length| length.parse().unwrap())).await;
        return (head, body);
    }
    let mut body = String::new();
    loop {
        let size = client.until("\r\n").await;
        let size = usize::from_str_radix(size.trim_end(), 16).unwrap();
        if size == 0 {
            body.push_str(client.until("\r\n").await.trim_end());
            return (head, body);
        }
        body.push_str(&client.exactly(size).await);
        client.until("\r\n").await;
    }
}

/// Joins the chunks of a message, if it has any.
pub(crate) fn whole_body(message: String) -> String {
    let Some((head, mut rest)) = message.split_once("\r\n\r\n") else { return message };
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return message;
    }
    let mut whole = format!("{head}\r\n\r\n");
    while let Some((size, data)) = rest.split_once("\r\n") {
        let Ok(size @ 1..) = usize::from_str_radix(size, 16) else {
            whole.push_str(data.trim_end());
            break;
        };
        whole.push_str(&data[..size]);
        rest = &data[size + 2..];
    }
    whole
}

/// Sorts the fields of a message, and drops those with times, identifiers and connection settings.
pub(crate) fn normal(message: &str) -> String {
    let Some((head, body)) = message.split_once("\r\n\r\n") else { return message.to_owned() };
    let mut lines = head.lines();
    // Reason phrases of other statuses than the usual ones differ.
    let first = lines.next().unwrap_or_default();
    let first = first.get(..12).filter(|start| start.starts_with("HTTP/")).unwrap_or(first).to_owned();
    let dropped = [
        "date",
        "x-request-id",
        "x-envoy-upstream-service-time",
        "x-forwarded",
        "server",
        "connection",
        "x-envoy-expected",
    ];
    let mut fields: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap_or((line, ""));
        let name = name.to_ascii_lowercase();
        // The length of an answer that contains a request differs with the fields above.
        let is_length = name == "content-length" && first.starts_with("HTTP");
        if !is_length && !dropped.iter().any(|other| name.starts_with(other)) {
            fields.entry(name).or_default().push(value.to_owned());
        }
    }
    let fields: Vec<_> =
        fields.iter().map(|(name, values)| format!("{name}: {}", values.join(","))).collect();
    format!("{first}\n{}\n\n{body}", fields.join("\n"))
}

/// Requires the same response from both, except for what depends on the arrival of the body; returns it.
pub(crate) async fn same_streamed(proxies: &[Either; 2], request: &str) -> (String, String) {
    // Envoy applies changes of headers in an answer to a chunk if the whole body arrives early.
    let settled = |text: &str| {
        let kept = text.lines().filter(|line| !line.to_ascii_lowercase().starts_with("x-body"));
        kept.collect::<Vec<_>>().join("\n")
    };
    let (head, got) = ask(&proxies[0], request).await;
    let theirs = (settled(&head), settled(&got));
    let (head, got) = ask(&proxies[1], request).await;
    let ours = (settled(&head), settled(&got));
    assert_eq!(ours, theirs, "{}", request.lines().next().unwrap_or_default());
    ours
}

/// Requires the same response from both; returns it.
pub(crate) async fn same(proxies: &[Either; 2], request: &str) -> (String, String) {
    let theirs = ask(&proxies[0], request).await;
    let ours = ask(&proxies[1], request).await;
    assert_eq!(ours, theirs, "{}", request.lines().next().unwrap_or_default());
    ours
}

pub(crate) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: a\r\nx-list: one\r\nx-gone: 1\r\nx-secret: s\r\n\r\n")
}

pub(crate) fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}")
}
