//! Loads against the echo servers, over real sockets.

mod tls;

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
};

use clap::Parser as _;

use crate::{
    args::LoadArgs,
    result::{HistogramData, RunResult},
    run, server,
    target::Target,
    worker::FOR_PERCENTILES,
};

#[derive(clap::Parser)]
struct CommandLine {
    #[command(flatten)]
    args: LoadArgs,
}

fn args(line: &str) -> LoadArgs {
    let line = ["load", "-quiet"].into_iter().chain(line.split(' ')).map(Into::into).collect();
    let command = <CommandLine as clap::CommandFactory>::command();
    CommandLine::parse_from(crate::accept_single_dashes(line, &command)).args
}

fn try_load(line: &str) -> anyhow::Result<RunResult> {
    let args = args(line);
    args.check()?;
    let target = Target::of(&args, args.url.as_deref().unwrap())?;
    run::measure(&args, &target, &run::shared(&args, FOR_PERCENTILES)?)
}

/// Runs a load with these arguments, of which the last is the URL.
fn load(line: &str) -> RunResult {
    let result = try_load(line).unwrap();
    let codes: u64 = result.ret_codes.values().sum();
    assert_eq!(codes, result.duration_histogram.count, "every request has one outcome");
    let buckets =
        result.duration_histogram.data.as_ref().map_or(0, |data| data.iter().map(|one| one.count).sum());
    assert_eq!(buckets, result.duration_histogram.count, "every request is in one bucket");
    let values: Vec<f64> =
        result.duration_histogram.percentiles.iter().flatten().map(|one| one.value).collect();
    assert!(values.is_sorted(), "{values:?}");
    result
}

fn http1() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || server::serve_http1(&listener).unwrap());
    address
}

fn http2() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || server::serve_http2(listener).unwrap());
    address
}

#[test]
fn every_protocol_counts_its_requests() {
    let (one, two) = (http1(), http2());
    for (line, run_type, code) in [
        (format!("-n 200 -qps 0 -c 8 http://{one}/"), "HTTP", "200"),
        (format!("-n 200 -qps 0 -c 8 -http1.0 -payload-size 100000 http://{one}/"), "HTTP", "200"),
        (format!("-n 200 -qps 2000 -c 3 -h2 -s 4 -payload hello http://{two}/"), "HTTP", "200"),
        (format!("-n 200 -qps 0 -c 2 -s 3 -grpc {two}"), "GRPC Health for ''", "SERVING"),
        (format!("-n 200 -qps 0 -ping -payload x grpc://{two}"), "GRPC Ping PayloadLength=1", "SERVING"),
    ] {
        let result = load(&line);
        assert_eq!(result.run_type, run_type, "{line}");
        assert_eq!(result.ret_codes.get(code), Some(&200), "{line}: {:?}", result.ret_codes);
        assert_eq!(result.socket_count, result.num_threads, "{line}");
        assert_eq!((result.skipped, result.unsent), (0, 0), "{line}");
    }
}

#[test]
fn a_rate_and_a_duration_give_a_number_of_requests() {
    let address = http1();
    let result = load(&format!("-qps 400 -t 500ms -c 4 http://{address}/"));
    assert_eq!(result.duration_histogram.count, 200);
    assert!(result.actual_duration >= 500_000_000);
    assert!(result.generator_lateness.count <= 200);
}

#[test]
fn responses_are_counted_by_status_and_connections_are_opened_again() {
    let address = http1();
    let result = load(&format!(
        "-qps 0 -n 400 -c 2 -allow-initial-errors http://{address}/?status=503:50&close=true:25&size=10"
    ));
    let count = |code: &str| result.ret_codes.get(code).copied().unwrap_or(0);
    assert_eq!(count("200") + count("503"), 400);
    assert!((100..300).contains(&count("503")), "{:?}", result.ret_codes);
    assert_eq!(result.errors_duration_histogram.count, count("503"));
    assert!((50..200).contains(&result.socket_count), "{}", result.socket_count);

    let result = load(&format!("-qps 0 -n 40 -c 2 -keepalive=false http://{address}/"));
    assert_eq!(result.socket_count, 42, "one for the first request of each, and one for each request");
    let result = load(&format!("-qps 0 -n 400 -c 2 -connection-reuse 10:20 http://{address}/"));
    assert!((20..50).contains(&result.socket_count), "{}", result.socket_count);
}

#[test]
fn requests_without_a_response_fail_by_reason() {
    let address = http1();
    let result =
        load(&format!("-qps 0 -n 6 -c 2 -timeout 50ms -allow-initial-errors http://{address}/?delay=20s"));
    assert_eq!(result.failures.get("timeout"), Some(&6), "{:?}", result.failures);
    assert_eq!(result.ret_codes.get("-1"), Some(&6));

    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let line = format!("-qps 0 -n 6 -c 2 http://{closed}/");
    for line in [line.clone(), format!("-h2 {line}")] {
        let error = try_load(&line).unwrap_err().to_string();
        assert!(error.contains("the first request") && error.contains("connect: "), "{error}");
        assert!(error.contains("Connection refused"), "{error}");
        let result = load(&format!("-allow-initial-errors {line}"));
        assert_eq!(result.failures.get("connect"), Some(&6), "{:?}", result.failures);
        assert!(result.failure_errors["connect"].contains("Connection refused"), "{line}");
    }
}

#[test]
fn slow_responses_delay_later_requests_in_the_open_loop_only() {
    let address = http1();
    let url = format!("http://{address}/?delay=50ms");
    // The connection has a request due every 10 ms, and a response every 50 ms.
    let open = load(&format!("-qps 100 -n 20 -c 1 {url}"));
    assert!(open.duration_histogram.max > 0.5, "{}", open.duration_histogram.max);
    assert!(open.since_sent_histogram.max < open.duration_histogram.max / 2.0);
    let skipped = load(&format!("-qps 100 -t 300ms -c 1 -nocatchup {url}"));
    assert!(skipped.skipped > 10, "{}", skipped.skipped);
    let sent = load(&format!("-qps 100 -n 10 -c 1 -from-sent {url}"));
    assert_eq!(sent.duration_histogram, sent.since_sent_histogram);
}

#[test]
fn no_request_is_sent_before_the_start() {
    let address = http1();
    for flags in ["-qps 0", "-qps 10000 -uniform=false"] {
        let result = load(&format!("{flags} -n 40 -c 4 http://{address}/"));
        assert!(result.actual_duration > 0 && result.actual_qps < 1e9, "{}", result.actual_qps);
        assert!(result.duration_histogram.min > 1e-6, "{flags}: {}", result.duration_histogram.min);
    }
}

#[test]
fn a_request_without_a_response_ends_beside_others() {
    let address = http1();
    // A tenth of the requests have no response in time, and the others keep the timer busy.
    let url = format!("http://{address}/?delay=20s:10");
    let result = load(&format!("-qps 200 -n 100 -c 4 -timeout 100ms -allow-initial-errors {url}"));
    assert_eq!(result.duration_histogram.count, 100, "{:?}", result.ret_codes);
    assert!(result.failures.contains_key("timeout"), "{:?}", result.failures);
}

#[test]
fn requests_that_are_not_sent_in_time_are_counted() {
    let (one, two) = (http1(), http2());
    for flags in [format!("http://{one}/"), format!("-h2 http://{two}/")] {
        let result = load(&format!("-qps 1000 -t 200ms -c 1 -timeout 300ms {flags}?delay=100ms"));
        let (sent, unsent) = (result.duration_histogram.count, result.unsent);
        assert_eq!(sent + unsent, 200, "{flags}");
        assert!(unsent > 150, "{flags}: {unsent}");
    }
}

#[test]
fn failures_at_once_do_not_nest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none");
    let line =
        format!("-qps 0 -n 20000 -c 1 -allow-initial-errors -unix-socket {} http://x/", path.display());
    let result = load(&line);
    assert_eq!(result.failures.get("connect"), Some(&20_000));
    assert!(result.failure_errors["connect"].contains("No such file"), "{:?}", result.failure_errors);
}

#[test]
fn many_requests_at_once_do_not_fill_the_memory_of_the_server() {
    let mut stream = TcpStream::connect(http1()).unwrap();
    let count = 50;
    let requests = "GET /?delay=1ms&size=1048576 HTTP/1.1\r\nhost: a\r\n\r\n".repeat(count);
    stream.write_all(requests.as_bytes()).unwrap();
    // The responses do not fit into the buffers of the socket.
    let (mut read, mut buffer) = (0, vec![0; 1 << 20]);
    while read < count << 20 {
        read += stream.read(&mut buffer).unwrap();
    }
    write!(stream, "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxGET / HTTP/1.1\r\n\r\n").unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("HTTP/1.1 400 ") && !rest.ends_with("200 OK"), "{rest}");
}

#[test]
fn an_outcome_can_abort_the_load() {
    let address = http1();
    let result = load(&format!(
        "-qps 0 -t 1h -c 2 -abort-on 503 -allow-initial-errors http://{address}/?status=503:1"
    ));
    assert!(result.interrupted && result.ret_codes.contains_key("503"), "{:?}", result.ret_codes);
}

/// Starts the page. Returns its address.
fn ui(folder: &std::path::Path) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let (address, folder) = (listener.local_addr().unwrap(), folder.to_owned());
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            match skysail_admin::serve(listener, crate::ui::router(folder)).await {}
        })
    });
    address
}

/// Sends a request to the page. Returns the status and the body.
fn get(address: SocketAddr, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn get_json(address: SocketAddr, path: &str) -> serde_json::Value {
    let (status, body) = get(address, path, "");
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).unwrap()
}

#[test]
fn the_page_runs_watches_ends_and_saves_loads() {
    let folder = tempfile::tempdir().unwrap();
    let (ui, target) = (ui(folder.path()), http1());
    let (status, page) = get(ui, "/", "");
    assert!(status == 200 && page.contains("<h1>skysail load</h1>"));

    let run = format!("/fortio/rest/run?url=http://{target}/");
    let result = get_json(ui, &format!("{run}&qps=0&n=50&labels=first&save=on"));
    assert_eq!(result["RetCodes"]["200"], 50);
    let id = result["ID"].as_str().unwrap();
    assert_eq!(get_json(ui, "/fortio/data/"), serde_json::json!([id]));
    assert_eq!(get_json(ui, &format!("/fortio/data/{id}.json"))["Labels"], "first");

    let started = get_json(ui, &format!("{run}&qps=200&t=0&p=50,99&async=on"));
    let number = started["RunID"].as_u64().unwrap();
    let status = || {
        let status = get_json(ui, &format!("/fortio/rest/status?runid={number}"));
        status["Statuses"][number.to_string()].clone()
    };
    let (mut count, mut last) = (0, serde_json::Value::Null);
    while count < 100 {
        last = status();
        assert_eq!((&last["State"], &last["Failed"]), (&"running".into(), &0.into()), "{last}");
        assert!(last["Count"].as_u64() >= Some(count), "counts do not decrease: {last}");
        count = last["Count"].as_u64().unwrap();
        check_live(&last);
        std::thread::yield_now();
    }
    assert_eq!(get_json(ui, &format!("/fortio/rest/stop?runid={number}"))["Count"], 1);
    while status()["State"] == "running" {
        std::thread::yield_now();
    }
    let ended = status();
    assert_eq!(ended["Result"]["Interrupted"], true, "{ended}");
    let of_result = &ended["Result"]["DurationHistogram"];
    assert_eq!((&ended["Count"], &ended["DurationHistogram"]), (&of_result["Count"], &().into()), "{ended}");
    let keys =
        |histogram: &serde_json::Value| histogram.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&last["DurationHistogram"]), keys(of_result));
}

/// Checks the histogram in the status of a load with `p=50,99` while it runs.
fn check_live(status: &serde_json::Value) {
    let histogram: HistogramData = serde_json::from_value(status["DurationHistogram"].clone()).unwrap();
    assert_eq!(Some(histogram.count), status["Count"].as_u64(), "{status}");
    let buckets = histogram.data.unwrap_or_default();
    assert_eq!(buckets.iter().map(|bucket| bucket.count).sum::<u64>(), histogram.count, "{status}");
    let edges: Vec<f64> = buckets.iter().flat_map(|bucket| [bucket.start, bucket.end]).collect();
    assert!(edges.is_sorted(), "{status}");
    if let Some(last) = buckets.last() {
        assert!((last.percent - 100.0).abs() < 1e-9 && last.end <= histogram.max, "{status}");
        let percentiles: Vec<f64> =
            histogram.percentiles.iter().flatten().map(|one| one.percentile).collect();
        assert_eq!(percentiles, [50.0, 99.0], "{status}");
    }
}

#[test]
fn the_page_serves_only_this_machine_and_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let ui = ui(folder.path());
    let run = "/fortio/rest/run?url=http://127.0.0.1:1/&n=1";
    for headers in
        ["origin: http://evil.example\r\n", "sec-fetch-site: cross-site\r\n", "host: evil.example\r\n"]
    {
        assert_eq!(get(ui, run, headers).0, 403, "{headers}");
    }
    for path in ["/fortio/data/..%2fsecret.json", "/fortio/data/.hidden.json", "/fortio/data/a%00.json"] {
        assert_eq!(get(ui, path, "").0, 400, "{path}");
    }
    assert_eq!(get(ui, "/fortio/data/none.json", "").0, 404);
    assert_eq!(get(ui, &format!("{run}&json=x"), "").0, 400);
    let (status, body) = get(ui, run, "");
    assert!(status == 500 && body.contains("the first request to http://127.0.0.1:1/"), "{body}");
}
