//! `skysail call --grpc`: gRPC calls with messages as JSON, as in grpcurl.

use std::{fs, io, path::PathBuf, time::Duration};

use anyhow::Context as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, MethodDescriptor, SerializeOptions, ServiceDescriptor, bytes::Bytes,
    prost::Message as _,
};
use skysail_core::{logging::printable, stdio};
use skysail_sandbox::http::{
    Event,
    grpc::{Client, Status},
    within,
};

use super::{
    ExchangePrinter,
    descriptors::{self, Reflection, unknown, wrong},
};

/// Options of `skysail call` for gRPC.
#[derive(Debug, Default, clap::Args)]
pub(super) struct GrpcOptions {
    /// Call a method of the gRPC server HOST:PORT. Messages are JSON documents: -d has those of the request, and those
    /// of the response are printed as they arrive. Descriptors come from server reflection, which is sent the same
    /// headers.
    #[arg(long, value_name = "SERVICE/METHOD", group = "grpc_mode",
        conflicts_with_all = ["method", "data_raw", "http2", "include", "head", "grpc_health"])]
    grpc: Option<String>,
    /// List the services of the gRPC server HOST:PORT and their methods.
    #[arg(long, group = "grpc_mode", conflicts_with_all = ["method", "data", "data_raw", "http2", "include", "head",
        "grpc_health", "count"])]
    grpc_list: bool,
    /// Descriptors of a server without reflection: the output of `protoc --include_imports --descriptor_set_out=FILE`.
    #[arg(long, value_name = "FILE", requires = "grpc_mode")]
    descriptor_set: Option<PathBuf>,
}

/// A task on a gRPC server: a call, or the list of its services.
pub(super) struct Session {
    server: String,
    headers: Vec<String>,
    task: Task,
    /// Descriptors from a file.
    descriptors: Option<DescriptorPool>,
    limit: Duration,
}

enum Task {
    List,
    Call {
        service: String,
        method: String,
        /// Messages of the request as consecutive JSON documents.
        input: Vec<u8>,
    },
}

impl GrpcOptions {
    /// Returns whether an option for gRPC is set.
    pub(super) fn is_used(&self) -> bool {
        self.grpc.is_some() || self.grpc_list
    }

    /// Returns the task that the options select, and reads the file of descriptors. Must be called before the pod is
    /// entered, because the pod may have other files.
    pub(super) fn session(
        &self,
        server: String,
        headers: Vec<String>,
        input: Vec<u8>,
        limit: Duration,
    ) -> anyhow::Result<Session> {
        let task = match &self.grpc {
            None => Task::List,
            Some(name) => {
                let parts = name.rsplit_once('/').or_else(|| name.rsplit_once('.'));
                let parts = parts.filter(|(service, method)| !service.is_empty() && !method.is_empty());
                let (service, method) = parts.with_context(|| {
                    format!("--grpc {name}: write SERVICE/METHOD, such as acme.Flights/Count")
                })?;
                let service = service.trim_start_matches('/').to_owned();
                Task::Call { service, method: method.to_owned(), input }
            }
        };
        let read = |file: &PathBuf| {
            let set = fs::read(file).map_err(|error| error.to_string());
            set.and_then(|set| descriptors::of_set(&set))
                .map_err(|error| anyhow::anyhow!("--descriptor-set {}: {error}", file.display()))
        };
        let descriptors = self.descriptor_set.as_ref().map(read).transpose()?;
        Ok(Session { server, headers, task, descriptors, limit })
    }
}

impl Session {
    /// Prints the services and their methods, or returns the call to make. Errors in the user's input have the kind
    /// `InvalidInput`.
    pub(super) async fn prepare(&self) -> io::Result<Option<Prepared<'_>>> {
        let pool = match &self.descriptors {
            Some(pool) => pool.clone(),
            None => within(self.limit, self.reflect()).await?,
        };
        let Task::Call { service, method, input } = &self.task else {
            let mut services: Vec<_> = pool.services().collect();
            services.sort_by(|one, other| one.full_name().cmp(other.full_name()));
            services.iter().try_for_each(|service| stdio::print(list(service))).map_err(io::Error::other)?;
            return Ok(None);
        };
        let found = pool.get_service_by_name(service).ok_or_else(|| {
            let known: Vec<String> = pool.services().map(|one| one.full_name().to_owned()).collect();
            unknown(format_args!("there is no service {service}; known services"), &known)
        })?;
        let mut methods = found.methods();
        let method = methods.find(|one| one.name() == method).ok_or_else(|| {
            let known: Vec<String> = found.methods().map(|one| one.name().to_owned()).collect();
            unknown(format_args!("{service} has no method {method}; its methods"), &known)
        })?;
        let messages = messages(&method, input).map_err(wrong)?;
        Ok(Some(Prepared { session: self, method, messages }))
    }

    /// Requests the server's descriptors: those of the service to call, or all.
    async fn reflect(&self) -> io::Result<DescriptorPool> {
        let mut client = Client::connect(&self.server, None, &mut |_| Ok(())).await?;
        let mut reflection = Reflection { client: &mut client, server: &self.server, headers: &self.headers };
        let mut query = async |question| reflection.query(question).await;
        let names = match &self.task {
            Task::Call { service, .. } => vec![service.clone()],
            Task::List => descriptors::services(&mut query).await?,
        };
        descriptors::of_services(&names, &mut query).await
    }
}

/// A call with its messages.
pub(super) struct Prepared<'a> {
    session: &'a Session,
    method: MethodDescriptor,
    messages: Vec<Bytes>,
}

impl Prepared<'_> {
    /// Makes the call on a new connection. Prints the messages of the response as they arrive.
    pub(super) async fn call(&self, shown: &mut ExchangePrinter) -> io::Result<Status> {
        let Session { server, headers, limit, .. } = self.session;
        let path = format!("{}/{}", self.method.parent_service().full_name(), self.method.name());
        let mut on = |event: Event<'_>| match event {
            Event::Body(message) => stdio::write(&self.json(message)?).map_err(io::Error::other),
            other => shown.show(other).map_err(io::Error::other),
        };
        let work = async {
            let mut client = Client::connect(server, None, &mut on).await?;
            client.call(&path, headers, &self.messages, &mut on).await
        };
        match within(*limit, work).await {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Ok(Status { code: Status::DEADLINE_EXCEEDED, message: error.to_string() })
            }
            result => result,
        }
    }

    fn json(&self, message: &[u8]) -> io::Result<Vec<u8>> {
        let kind = self.method.output();
        let broken = |error: &dyn std::fmt::Display| {
            let what = format!("a message of the response is not a valid {}: {error}", kind.full_name());
            io::Error::new(io::ErrorKind::InvalidData, what)
        };
        let message = DynamicMessage::decode(kind.clone(), message).map_err(|error| broken(&error))?;
        let mut json = serde_json::Serializer::pretty(Vec::new());
        message
            .serialize_with_options(&mut json, &SerializeOptions::new())
            .map_err(|error| broken(&error))?;
        let mut json = json.into_inner();
        json.push(b'\n');
        Ok(json)
    }
}

/// Prints the status of a call as the last line.
pub(super) fn print_status(status: &Status) {
    stdio::print_error(printable(status));
}

/// Returns a service and its methods, one per line: `acme.Flights/Count (acme.Day) returns (stream acme.Number)`.
fn list(service: &ServiceDescriptor) -> String {
    let stream = |is_stream: bool| if is_stream { "stream " } else { "" };
    let lines = service.methods().map(|method| {
        let [from, to] = [method.is_client_streaming(), method.is_server_streaming()].map(stream);
        let (input, output) = (method.input(), method.output());
        printable(format_args!(
            "{}/{} ({from}{}) returns ({to}{})",
            service.full_name(),
            method.name(),
            input.full_name(),
            output.full_name()
        ))
    });
    let lines: Vec<_> = lines.collect();
    if lines.is_empty() {
        format!("{} (no methods)", printable(service.full_name()))
    } else {
        lines.join("\n")
    }
}

/// Encodes JSON documents as the messages of a request. Without a document, a method that takes one message gets an
/// empty one.
fn messages(method: &MethodDescriptor, input: &[u8]) -> Result<Vec<Bytes>, String> {
    let mut documents = serde_json::Deserializer::from_slice(input);
    let mut messages = Vec::new();
    while documents.end().is_err() {
        let message = DynamicMessage::deserialize(method.input(), &mut documents)
            .map_err(|error| format!("-d: message {}: {error}", messages.len() + 1))?;
        messages.push(Bytes::from(message.encode_to_vec()));
    }
    match messages.len() {
        _ if method.is_client_streaming() => {}
        0 => messages.push(Bytes::new()),
        1 => {}
        count => return Err(format!("-d: {} takes one message, and there are {count}", method.full_name())),
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use prost_reflect::prost_types::{
        DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto,
        ServiceDescriptorProto,
    };

    use super::*;

    /// `acme.Flights` with `Count` (one message each way) and `Talk` (streams), of `message Day { string day = 1; }`.
    fn pool() -> DescriptorPool {
        let text = |text: &str| Some(text.to_owned());
        let field = FieldDescriptorProto {
            name: text("day"),
            number: Some(1),
            r#type: Some(9),
            label: Some(1),
            ..FieldDescriptorProto::default()
        };
        let method = |name: &str, streams: bool| MethodDescriptorProto {
            name: text(name),
            input_type: text(".acme.Day"),
            output_type: text(".acme.Day"),
            client_streaming: Some(streams),
            server_streaming: Some(streams),
            ..MethodDescriptorProto::default()
        };
        let service = ServiceDescriptorProto {
            name: text("Flights"),
            method: vec![method("Count", false), method("Talk", true)],
            ..ServiceDescriptorProto::default()
        };
        let message = DescriptorProto { name: text("Day"), field: vec![field], ..DescriptorProto::default() };
        let file = FileDescriptorProto {
            name: text("acme.proto"),
            package: text("acme"),
            syntax: text("proto3"),
            message_type: vec![message],
            service: vec![service],
            ..FileDescriptorProto::default()
        };
        descriptors::of_set(&FileDescriptorSet { file: vec![file] }.encode_to_vec()).unwrap()
    }

    fn method(name: &str) -> MethodDescriptor {
        let service = pool().get_service_by_name("acme.Flights").unwrap();
        service.methods().find(|method| method.name() == name).unwrap()
    }

    #[test]
    fn json_documents_are_encoded_as_messages() {
        let encoded = |name: &str, input: &str| messages(&method(name), input.as_bytes());
        let mon = Bytes::from_static(b"\x0a\x03mon");
        for (name, input, expected) in [
            ("Count", " {\"day\": \"mon\"}\n", vec![mon.clone()]),
            ("Count", "", vec![Bytes::new()]),
            ("Talk", "", vec![]),
            ("Talk", "{\"day\":\"mon\"}{}\n{\"day\":\"mon\"}", vec![mon.clone(), Bytes::new(), mon]),
        ] {
            assert_eq!(encoded(name, input), Ok(expected), "{name} {input}");
        }
        for (name, input, problem) in [
            ("Count", "{}{}", "acme.Flights.Count takes one message, and there are 2"),
            ("Talk", "{} {\"dya\": 1}", "-d: message 2: unrecognized field name 'dya'"),
            ("Count", "{\"day\": 1}", "-d: message 1: "),
            ("Count", "{", "-d: message 1: "),
        ] {
            let error = encoded(name, input).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn services_are_listed_with_the_types_of_their_methods() {
        let service = pool().get_service_by_name("acme.Flights").unwrap();
        assert_eq!(
            list(&service),
            "acme.Flights/Count (acme.Day) returns (acme.Day)\n\
             acme.Flights/Talk (stream acme.Day) returns (stream acme.Day)"
        );
    }

    fn session(name: &str) -> Result<Session, String> {
        let options = GrpcOptions { grpc: Some(name.to_owned()), ..GrpcOptions::default() };
        let session = options.session("a:1".to_owned(), Vec::new(), Vec::new(), Duration::from_secs(60));
        let session = session.map_err(|error| error.to_string())?;
        Ok(Session { descriptors: Some(pool()), ..session })
    }

    #[tokio::test]
    async fn methods_are_found_with_a_slash_or_a_dot() {
        for name in ["acme.Flights/Count", "/acme.Flights/Count", "acme.Flights.Count"] {
            let session = session(name).unwrap();
            let prepared = session.prepare().await.unwrap().unwrap();
            assert_eq!(prepared.method.full_name(), "acme.Flights.Count");
            assert_eq!(prepared.json(b"\x0a\x01a").unwrap(), b"{\n  \"day\": \"a\"\n}\n");
            let broken = prepared.json(b"\x0a\x09a").unwrap_err().to_string();
            assert!(broken.starts_with("a message of the response is not a valid acme.Day: "), "{broken}");
        }
        for (name, problem) in [
            ("acme.Flights/Cuont", "acme.Flights has no method Cuont; its methods: Count, Talk"),
            ("acme.Flight/Count", "there is no service acme.Flight; known services: acme.Flights"),
        ] {
            let session = session(name).unwrap();
            let error = session.prepare().await.err().unwrap();
            assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::InvalidInput, problem.to_owned()));
        }
        for name in ["Count", "/Count", "acme.Flights/"] {
            assert!(session(name).err().unwrap().contains("write SERVICE/METHOD"), "{name}");
        }
    }
}
