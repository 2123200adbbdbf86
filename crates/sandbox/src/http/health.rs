//! Health checks of gRPC servers. Source: `grpc.health.v1.Health/Check`.

use std::{fmt, io, net::Ipv4Addr, time::Duration};

use bytes::Bytes;

use super::{
    Event,
    grpc::{Client, Status},
    within,
};

/// Maximum size of the answer, in bytes; a valid one has at most 2.
const MAX_ANSWER: usize = 1 << 10;
/// Names of `HealthCheckResponse.ServingStatus`, by number.
const NAMES: [&str; 4] = ["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"];

/// Status of a health check: `HealthCheckResponse.ServingStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health(u8);

impl Health {
    /// Returns whether the service accepts requests.
    pub fn is_serving(self) -> bool {
        self.0 == 1
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get(usize::from(self.0)) {
            Some(name) => f.write_str(name),
            None => write!(f, "status {}", self.0),
        }
    }
}

/// Checks a service of the gRPC server at `http://HOST:PORT`; the empty name stands for the server.
///
/// # Errors
/// When no answer arrives in time, or the server refuses the call; the error has the gRPC status.
pub async fn grpc_health(
    server: &str,
    from: Option<Ipv4Addr>,
    service: &str,
    limit: Duration,
) -> io::Result<Health> {
    let question = [question(service)?];
    let mut answer = None;
    let mut on = |event: Event<'_>| {
        if let Event::Body(message) = event {
            answer = Some(message.to_vec());
        }
        Ok(())
    };
    let call = async {
        let mut client = Client::connect(server, from, &mut on).await?;
        client.max_message = MAX_ANSWER;
        client.call("grpc.health.v1.Health/Check", &[], &question, &mut on).await
    };
    let status = within(limit, call).await?;
    read(&status, answer.as_deref()).map_err(io::Error::other)
}

/// Encodes `HealthCheckRequest { string service = 1; }`.
fn question(service: &str) -> io::Result<Bytes> {
    let length = u8::try_from(service.len()).ok().filter(|length| *length < 0x80);
    let length = length.ok_or_else(|| super::invalid("the service's name is longer than 127 bytes"))?;
    Ok([&[0x0a, length], service.as_bytes()].concat().into())
}

/// Decodes `HealthCheckResponse { ServingStatus status = 1; }`, in which a zero is omitted.
fn read(status: &Status, answer: Option<&[u8]>) -> Result<Health, String> {
    match (status.is_ok(), answer) {
        (true, Some([0x08, serving @ 0..0x80])) => Ok(Health(*serving)),
        (true, Some([])) => Ok(Health(0)),
        (true, _) => Err("the answer is not one of a health service".to_owned()),
        (false, _) => Err(status.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, Response};
    use tokio::net::TcpListener;

    use super::*;

    /// Answers one call with these bytes, and this status in the trailers.
    async fn answer(listener: TcpListener, message: &'static [u8], status: &'static str) -> (String, Bytes) {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        let driver = tokio::spawn(async move { while connection.accept().await.is_some() {} });
        let (head, mut body) = request.into_parts();
        let question = body.data().await.unwrap().unwrap();
        let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let mut stream = respond.send_response(response, false).unwrap();
        stream.send_data(Bytes::from_static(message), false).unwrap();
        let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())]);
        stream.send_trailers(trailers).unwrap();
        driver.await.unwrap();
        (head.uri.path().to_owned(), question)
    }

    #[tokio::test]
    async fn a_server_is_checked_and_its_answer_is_decoded() {
        for (message, status, expected) in [
            (&[0, 0, 0, 0, 2, 8, 1][..], "0", Ok("SERVING")),
            (&[0, 0, 0, 0, 2, 8, 2], "0", Ok("NOT_SERVING")),
            (&[], "12", Err("UNIMPLEMENTED")),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let server = format!("http://{}/", listener.local_addr().unwrap());
            let answered = tokio::spawn(answer(listener, message, status));
            let health = grpc_health(&server, None, "ab", Duration::from_secs(60)).await;
            let health = health.map(|health| health.to_string()).map_err(|error| error.to_string());
            assert_eq!(health, expected.map(str::to_owned).map_err(str::to_owned));
            let (path, question) = answered.await.unwrap();
            assert_eq!(path, "/grpc.health.v1.Health/Check");
            assert_eq!(&*question, [0, 0, 0, 0, 4, 0x0a, 2, b'a', b'b']);
        }
    }

    #[test]
    fn each_status_has_its_name() {
        let named = |code: u32, answer: Option<&[u8]>| {
            let status = Status { code, message: "why".to_owned() };
            read(&status, answer).map(|health| health.to_string())
        };
        for (answer, name) in
            [(&[8, 1][..], "SERVING"), (&[8, 2], "NOT_SERVING"), (&[], "UNKNOWN"), (&[8, 9], "status 9")]
        {
            assert_eq!(named(0, Some(answer)).unwrap(), name);
        }
        assert_eq!(named(5, None).unwrap_err(), "NOT_FOUND: why");
        assert!(named(0, None).is_err() && named(0, Some(b"<html>")).is_err());
    }

    #[test]
    fn a_request_names_the_service() {
        assert_eq!(&*question("ab").unwrap(), [0x0a, 2, b'a', b'b']);
        assert!(question(&"a".repeat(128)).is_err());
    }
}
