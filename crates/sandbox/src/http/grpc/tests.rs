use std::time::Duration;

use http::Response;
use tokio::net::TcpListener;

use super::*;

/// Response of a server: head, body, and trailers or the reason of a reset.
struct Answer {
    head: &'static [(&'static str, &'static str)],
    status: u16,
    body: Vec<u8>,
    end: Result<&'static [(&'static str, &'static str)], h2::Reason>,
}

const GRPC: &[(&str, &str)] = &[("content-type", "application/grpc")];
const OK: &[(&str, &str)] = &[("grpc-status", "0")];

fn answer(body: &[u8]) -> Answer {
    Answer { head: GRPC, status: 200, body: body.to_vec(), end: Ok(OK) }
}

fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    fields
        .iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect()
}

/// Answers one call. Returns the request's head and body.
async fn serve(listener: TcpListener, answer: Answer) -> (http::request::Parts, Vec<u8>) {
    let (stream, _) = listener.accept().await.unwrap();
    let mut connection = h2::server::handshake(stream).await.unwrap();
    let (request, mut respond) = connection.accept().await.unwrap().unwrap();
    let driver = tokio::spawn(async move { while let Some(Ok(_)) = connection.accept().await {} });
    let (head, mut incoming) = request.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = incoming.data().await {
        let piece = piece.unwrap();
        incoming.flow_control().release_capacity(piece.len()).unwrap();
        body.extend_from_slice(&piece);
    }
    let mut response = Response::new(());
    *response.status_mut() = answer.status.try_into().unwrap();
    *response.headers_mut() = map(answer.head);
    let mut stream = respond.send_response(response, false).unwrap();
    // The client may have left already.
    let _ = stream.send_data(answer.body.into(), false);
    match answer.end {
        Ok(trailers) => _ = stream.send_trailers(map(trailers)),
        Err(reason) => stream.send_reset(reason),
    }
    driver.await.unwrap();
    (head, body)
}

/// Calls a server with this response. Returns the messages, and the status or the error.
async fn call(answer: Answer) -> (Vec<Vec<u8>>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap().to_string();
    let served = tokio::spawn(serve(listener, answer));
    let mut messages = Vec::new();
    let mut on = |event: Event<'_>| {
        if let Event::Body(message) = event {
            messages.push(message.to_vec());
        }
        Ok(())
    };
    let mut client = Client::connect(&server, None, &mut on).await.unwrap();
    let status = client.call("a.B/C", &["x-one: 1".to_owned()], &["ab".into(), "".into()], &mut on).await;
    drop(client);
    let (head, body) = served.await.unwrap();
    assert_eq!((head.method.as_str(), head.uri.path()), ("POST", "/a.B/C"));
    for (name, value) in [("content-type", "application/grpc"), ("te", "trailers"), ("x-one", "1")] {
        assert_eq!(head.headers[name], value);
    }
    assert_eq!(body, b"\0\0\0\0\x02ab\0\0\0\0\0");
    (messages, status.map_or_else(|error| error.to_string(), |status| status.to_string()))
}

#[tokio::test]
async fn messages_arrive_before_the_status() {
    let two = b"\0\0\0\0\x03abc\0\0\0\0\0";
    let expected = vec![b"abc".to_vec(), Vec::new()];
    assert_eq!(call(answer(two)).await, (expected.clone(), "OK".to_owned()));
    let failed: &[_] = &[("grpc-status", "5"), ("grpc-message", "no %C3%BC%0a%zz")];
    let status = "NOT_FOUND: no \u{fc}\n%zz".to_owned();
    assert_eq!(call(Answer { end: Ok(failed), ..answer(two) }).await, (expected.clone(), status));
    let unknown: &[_] = &[("grpc-status", "99")];
    assert_eq!(
        call(Answer { end: Ok(unknown), ..answer(two) }).await,
        (expected.clone(), "code 99".to_owned())
    );
    let none = "UNKNOWN: the response has no grpc-status".to_owned();
    assert_eq!(call(Answer { end: Ok(&[]), ..answer(two) }).await, (expected.clone(), none));
    let reset = call(Answer { end: Err(h2::Reason::REFUSED_STREAM), ..answer(two) }).await.1;
    assert!(reset.starts_with("UNAVAILABLE: the stream was reset"), "{reset}");
}

#[tokio::test]
async fn a_response_that_is_not_grpc_is_an_error() {
    for (answer, problem) in [
        (answer(b"\0\0\0\0\x03ab"), "it ends within a message"),
        (answer(b"\x01\0\0\0\0"), "a message is compressed"),
        (answer(b"\x02\0\0\0\0"), "unknown flag"),
        (answer(b"\0\xff\xff\xff\xff"), "larger than the limit of 16777216 bytes"),
        (
            Answer { head: &[("content-type", "text/html")], ..answer(b"") },
            "its content-type is \"text/html\"",
        ),
        (Answer { head: &[], status: 503, ..answer(b"") }, "UNAVAILABLE: HTTP status 503"),
        (Answer { head: &[], status: 403, ..answer(b"") }, "PERMISSION_DENIED: HTTP status 403"),
        (Answer { head: &[("grpc-status", "12")], ..answer(b"") }, "UNIMPLEMENTED"),
        (
            Answer { head: &[("grpc-status", "x")], ..answer(b"") },
            "UNKNOWN: the server's grpc-status is not a number",
        ),
    ] {
        let (messages, status) = call(answer).await;
        assert!(messages.is_empty() && status.contains(problem), "{problem}: {status}");
    }
}

#[tokio::test]
async fn an_endless_stream_is_passed_on_until_the_caller_ends_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
        tokio::spawn(async move { while let Some(Ok(_)) = connection.accept().await {} });
        let mut response = Response::new(());
        *response.headers_mut() = map(GRPC);
        let mut stream = respond.send_response(response, false).unwrap();
        let message = frames(&[vec![b'a'; 1000].into()]).unwrap();
        loop {
            stream.reserve_capacity(message.len());
            if std::future::poll_fn(|context| stream.poll_capacity(context))
                .await
                .is_none_or(|it| it.is_err())
            {
                break;
            }
            stream.send_data(message.clone(), false).unwrap();
        }
    });
    let (mut seen, enough) = (0_u64, tokio::sync::Notify::new());
    let mut client = Client::connect(&server, None, &mut |_| Ok(())).await.unwrap();
    let mut on = |event: Event<'_>| {
        seen += u64::from(matches!(event, Event::Body(_)));
        // Larger than the windows of HTTP/2.
        if seen > 1_000 {
            enough.notify_one();
        }
        Ok(())
    };
    tokio::select! {
        status = client.call("a.B/C", &[], &[], &mut on) => panic!("{status:?}"),
        ended = tokio::time::timeout(Duration::from_secs(60), enough.notified()) => ended.unwrap(),
    }
}

#[tokio::test]
async fn servers_and_headers_are_checked() {
    for (server, problem) in [
        ("https://a:1", "write http://"),
        ("http://a:1/b", "a gRPC server has no path"),
        ("", "is not a URL"),
    ] {
        let error = Client::connect(server, None, &mut |_| Ok(())).await.err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains(problem), "{error}");
    }
}
