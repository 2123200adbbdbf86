//! The table of codes: name, number, severity, codes of `istioctl analyze` for the same mistake, meaning, and remedy.

use super::{CodeProperties, Severity};

codes! {
    // Texts and objects.
    NotYaml "SKY0001" Error []
        "The text is not YAML, or it exceeds a limit of size or depth."
        "Correct indentation, quotes and colons on the line of the finding and on the line before it."
    DuplicateKey "SKY0002" Error ["IST0106"]
        "A mapping has a key twice."
        "Remove one of the two, or merge their values."
    MissingSeparator "SKY0003" Error []
        "A second object begins without a line `---` before it."
        "Write a line `---` between the objects."
    NotAnObject "SKY0004" Error []
        "The document is not a Kubernetes object."
        "Add `apiVersion`, `kind` and `metadata`, or move the file out of the folder. Render templates of other tools first."
    UnknownKind "SKY0005" Error ["IST0106"]
        "No API has this kind with this `apiVersion`."
        "Correct the spelling of `kind` or `apiVersion`."
    UnsupportedKind "SKY0006" Warning []
        "The mesh does not read this kind, although its name suggests an effect on the mesh."
        "Use the kind that the finding names, or remove the object."
    ForeignKind "SKY0007" Info []
        "The mesh does not use objects of this kind."
        "No action is needed."
    UnknownField "SKY0008" Error ["IST0106"]
        "The kind has no field of this name, so the API server refuses the object."
        "Correct the spelling, or indent the field below the mapping that it belongs to."
    UnknownKubernetesField "SKY0009" Warning ["IST0106"]
        "The Kubernetes kind has no field of this name; the field is dropped."
        "Correct the spelling or the indentation, or remove the field."
    WrongType "SKY0010" Error ["IST0106"]
        "The value has another type or form than the field."
        "Write a value of the type that the finding names."
    UnknownValue "SKY0011" Error ["IST0106"]
        "The value is not one of the values that the field allows."
        "Use one of the values that the finding lists."
    DuplicateObject "SKY0012" Warning []
        "An object is defined twice with different contents; the last definition takes effect."
        "Remove one of the definitions."
    Unreadable "SKY0013" Error []
        "The file cannot be read."
        "Correct the permissions of the file, or remove it."
    LastVersionKept "SKY0014" Warning []
        "The last valid version of a refused object stays in effect."
        "Fix the errors of the object."
    PolicyFallback "SKY0015" Warning []
        "A refused policy is replaced by one that restricts at least as much, or no version of it is in effect."
        "Fix the errors of the policy."
    MisplacedMeshConfig "SKY0016" Warning []
        "A ConfigMap looks like the mesh configuration and is not it."
        "Write the settings to key `mesh` of ConfigMap `istio` in namespace `istio-system`."
    TooManyErrors "SKY0017" Error []
        "A text has more objects or errors than the limits allow. With too many objects none is read, with too many errors the rest."
        "Divide the file, or correct the first errors."
    UnservedRoute "SKY0018" Error []
        "No proxy serves routes of this kind, so their traffic reaches no backend."
        "Remove the route, and use what the finding names."

    // Values of fields.
    MissingField "SKY0101" Error ["IST0106"]
        "A required field is missing."
        "Add the field."
    EmptyField "SKY0102" Error ["IST0106"]
        "A field has an empty value."
        "Set a value, or remove the field."
    ExclusiveFields "SKY0103" Error ["IST0106"]
        "Fields exclude each other, or exactly one field of a group must be set."
        "Keep one of the fields."
    FieldNotAllowed "SKY0104" Error ["IST0106"]
        "The field is not allowed here because of another field."
        "Remove the field, or change the field that excludes it."
    InvalidValue "SKY0105" Error ["IST0106"]
        "The value is not valid for the field."
        "Write a value of the form that the finding names."
    OutOfRange "SKY0106" Error ["IST0106"]
        "A number is below the minimum or above the maximum of the field."
        "Use a number within the range."
    InvalidName "SKY0107" Error ["IST0106"]
        "The name is not valid for its object or part."
        "Use lower-case letters, digits and `-`; begin and end with a letter or a digit."
    DuplicateName "SKY0108" Error ["IST0106"]
        "Two items of a list have the same name, or an item is listed twice."
        "Rename or remove one of them."
    InvalidHost "SKY0109" Error ["IST0106"]
        "The text is not a host name that the field allows."
        "Write the host name alone: without scheme, port and path, and with `*` only as the whole first label."
    InvalidPort "SKY0110" Error ["IST0106"]
        "The number is not a port."
        "Use a number from 1 to 65535."
    DuplicatePort "SKY0111" Error ["IST0106"]
        "Two ports of an object have the same number."
        "Remove one of them, or change its number."
    InvalidAddress "SKY0112" Error ["IST0106"]
        "The text is not an IP address, a CIDR block or a socket, as the field requires."
        "Write an address such as `10.0.0.1` or a block such as `10.0.0.0/8`."
    InvalidRegex "SKY0113" Error ["IST0106", "IST0122"]
        "The text is not an RE2 regular expression, or a replacement does not fit the expression."
        "Correct the expression. The syntax is that of RE2."
    InvalidDuration "SKY0114" Error ["IST0106"]
        "The duration is too short."
        "Use a duration of at least 1ms, or remove the field to use the default."
    InvalidPercentage "SKY0115" Error ["IST0106"]
        "The number is not a percentage, or the fraction is not between 0 and 1."
        "Use a number from 0 to 100."
    InvalidStatus "SKY0116" Error ["IST0106"]
        "The value is not a status that the field allows."
        "Use a status of HTTP or gRPC that fits the field."
    InvalidHeader "SKY0117" Error ["IST0106"]
        "The text is not a valid name or value of a header."
        "Use letters, digits and `-` in names, and no control characters in values."
    ProtectedHeader "SKY0118" Error ["IST0106"]
        "The header cannot be changed here."
        "Use the field for it, such as `rewrite.authority` or `rewrite.uri`."
    InvalidLabel "SKY0119" Error ["IST0106"]
        "The text is not a valid label, or a selector has a wildcard."
        "Write keys and values as Kubernetes defines them."
    InvalidPath "SKY0120" Error ["IST0106"]
        "The text is not a valid path for the field."
        "Begin with `/`, and leave out relative elements, query and fragment."
    InvalidUrl "SKY0121" Error ["IST0106"]
        "The text is not a URL with scheme `http` or `https`."
        "Write the whole URL."
    InvalidExportTo "SKY0122" Error ["IST0106"]
        "An entry of `exportTo` is not valid."
        "Use `.`, `*` or the name of a namespace; use `~` alone."
    InvalidTrustDomain "SKY0123" Error ["IST0106"]
        "The text is not a trust domain."
        "Write the name alone, such as `cluster.local`."
    UnknownProtocol "SKY0124" Error ["IST0106"]
        "The text is not a protocol of ports."
        "Use HTTP, HTTPS, HTTP2, GRPC, TLS, TCP, MONGO or UDP."
    TooMany "SKY0125" Error ["IST0106"]
        "A list has more items than allowed, or a text or an object is too large."
        "Split the object."
    NoEffect "SKY0126" Warning ["IST0133"]
        "The field has no effect."
        "Remove the field."
    EmptySelector "SKY0127" Warning ["IST0133"]
        "The selector has no labels, so it selects everything or nothing."
        "Add labels, or remove the selector."
    InvalidExpression "SKY0128" Error ["IST0106"]
        "The text is not a CEL expression, or it is too long."
        "Correct the expression."
    InvalidFormat "SKY0129" Error ["IST0106"]
        "A percent sign in the text begins no command operator that Envoy has."
        "Use an operator such as `%REQ(NAME)%`, or write `%%` for a percent sign."
    InvalidLogFormat "SKY0130" Warning ["IST0133"]
        "The format of an access log is no JSON, or has an operator that Envoy does not have. The default is used in its place."
        "Correct the format, and write `%%` for a percent sign."

    // Routing.
    RouteWithoutAction "SKY0201" Error ["IST0106"]
        "An HTTP rule has no destination, redirect, direct response or delegate."
        "Add `route`, `redirect`, `directResponse` or `delegate`."
    ZeroWeights "SKY0202" Error ["IST0106"]
        "All weights of a route are 0, so no destination gets requests."
        "Set the weight of at least one destination above 0."
    InvalidWeight "SKY0203" Error ["IST0106"]
        "The weight is below 0, or the weights are too large."
        "Use weights from 0 to 1000000."
    MissingWeight "SKY0204" Warning ["IST0133"]
        "A destination without a weight beside destinations with a weight gets no requests."
        "Set the weight of each destination."
    UnreachableRule "SKY0205" Warning ["IST0130", "IST0131"]
        "An earlier rule matches every request of this rule."
        "Put the more specific rule first, or remove this rule."
    WildcardHost "SKY0206" Error ["IST0106"]
        "A VirtualService for the mesh has host `*`."
        "List the hosts, or set `gateways`."
    SniHostNotCovered "SKY0207" Error ["IST0106"]
        "A server name of a TLS rule is none of the hosts of the VirtualService."
        "Add the server name to `spec.hosts`."
    NotADelegate "SKY0208" Error ["IST0106"]
        "A VirtualService without hosts is a delegate, and delegates allow HTTP rules only."
        "Add hosts, or remove the field."
    NeverMatches "SKY0209" Warning ["IST0133"]
        "The value can match no request."
        "Correct the value as the finding says."
    LiteralPattern "SKY0210" Warning ["IST0133"]
        "A wildcard or a regular expression is compared as plain text."
        "Use `prefix` or `regex`, or a wildcard where it is allowed."
    RetriesDisabled "SKY0211" Error ["IST0106"]
        "`attempts` is 0, so the other retry settings have no effect."
        "Remove the other settings, or set `attempts` to 1 or more."
    RetryTimeout "SKY0212" Warning []
        "The timeout of an attempt is longer than the timeout of the request."
        "Shorten `perTryTimeout`, or lengthen `timeout`."
    BackendTimeout "SKY0213" Error []
        "`backendRequest` is longer than `request`."
        "Shorten `backendRequest`, or lengthen `request`."
    SubsetWithoutLabels "SKY0214" Warning ["IST0133"]
        "A subset without labels contains every endpoint of the host."
        "Add the labels of the subset's pods."
    LocalityWeights "SKY0215" Error ["IST0106"]
        "The weights of a locality do not add up to 100."
        "Change the weights."
    CredentialForGateways "SKY0216" Info ["IST0128", "IST0129"]
        "Only gateways get the credential of a DestinationRule without `workloadSelector`."
        "No action is needed if only a gateway connects to the host. Otherwise add a `workloadSelector`."
    Deprecated "SKY0217" Warning ["IST0002"]
        "The field is deprecated, or it was removed from Istio."
        "Use the field that the finding names."
    DuplicateMatch "SKY0218" Info ["IST0131"]
        "An earlier match, of an earlier rule or of the same one, covers this match or is equal to it."
        "Remove the match."
    InternalGateway "SKY0219" Warning ["IST0165"]
        "A VirtualService names the internal Gateway that is made from a Gateway of Gateway API."
        "Use an HTTPRoute, or a Gateway of Istio's API."

    // Gateways, external services and proxies.
    ServerWithoutTls "SKY0301" Error ["IST0106"]
        "A server with protocol HTTPS or TLS has no TLS settings."
        "Add `tls` with a mode and a credential."
    TlsOnPlainPort "SKY0302" Error ["IST0106"]
        "A server with a protocol without TLS has TLS settings."
        "Use protocol HTTPS or TLS, or remove `tls`."
    TlsVersions "SKY0303" Error ["IST0106"]
        "`minProtocolVersion` is above `maxProtocolVersion`."
        "Exchange or remove one of them."
    UnknownCipher "SKY0304" Warning ["IST0106"]
        "A cipher suite is unknown or listed twice, and is left out."
        "Use names of OpenSSL, each once."
    ServerPortConflict "SKY0305" Warning []
        "Two servers of a Gateway use a port with different protocols."
        "Use another port for one of them."
    ServerHostTwice "SKY0306" Warning ["IST0145"]
        "An earlier server of the same port serves this host already."
        "Remove the host from one of the servers."
    ListenerConflict "SKY0307" Error []
        "Two listeners of a Gateway have the same port, protocol and hostname."
        "Change one of them."
    RouteWithoutParent "SKY0308" Warning []
        "A route without `parentRefs` has no effect."
        "Add the Gateway or the Service that the route is for."
    ParentWithoutEffect "SKY0309" Warning []
        "The mesh has no parents of this kind."
        "Use a Gateway, a ListenerSet or a Service."
    UnsupportedBackend "SKY0310" Warning []
        "The mesh has no backends of this kind: requests get 500."
        "Use a Service."
    EntryResolution "SKY0311" Error ["IST0106"]
        "Hosts, ports or endpoints do not fit the resolution of a ServiceEntry."
        "Change `resolution`, or the field that the finding names."
    WildcardResolution "SKY0312" Error ["IST0106"]
        "DNS cannot resolve a wildcard host."
        "Use resolution NONE or DYNAMIC_DNS, or list the hosts."
    UnknownPortName "SKY0313" Error ["IST0106"]
        "An endpoint maps a port that the ServiceEntry does not have."
        "Use the name of a port in `spec.ports`."
    InvalidPatch "SKY0314" Error ["IST0106"]
        "The value of a patch does not fit the message of Envoy that it changes."
        "Correct the field of the value that the finding names."
    PatchWithoutEffect "SKY0315" Warning ["IST0133"]
        "A patch of an EnvoyFilter has no effect."
        "Correct or remove the patch."
    PatchOperation "SKY0316" Warning ["IST0152", "IST0153", "IST0154"]
        "The operation of a patch does nothing with this `applyTo`."
        "Use an operation that Istio applies to it."
    RelativePatch "SKY0317" Info ["IST0151", "IST0155"]
        "A patch that depends on other filters has no `priority`, so it may be applied before them."
        "Set `priority`, or use INSERT_FIRST or ADD."

    // Security.
    InvalidTarget "SKY0401" Error ["IST0106"]
        "The policy cannot be attached to an object of this kind."
        "Use a kind that the finding names."
    TargetIgnored "SKY0402" Warning []
        "Only waypoint proxies apply a policy with this target."
        "Use a selector for the pods."
    PolicyWithoutEffect "SKY0403" Warning ["IST0133"]
        "The policy is empty and has no effect."
        "Add the settings or rules, or remove the policy."
    DenyNothing "SKY0404" Warning []
        "A DENY policy without rules denies no request."
        "Add a rule; `rules: [{}]` denies every request."
    DenyAll "SKY0405" Info []
        "An ALLOW policy without rules denies all requests that no other policy allows."
        "No action is needed if this is intended."
    AllowAll "SKY0406" Warning []
        "A rule without conditions allows every client."
        "Add conditions, or remove the policy."
    EmptyRuleField "SKY0407" Error ["IST0106"]
        "A field of a rule has no value; without it the policy would match more."
        "Add values, or remove the field."
    UnknownAttribute "SKY0408" Error ["IST0106"]
        "The key of a condition is no attribute of requests."
        "Use an attribute of Istio's list, such as `request.headers[name]`."
    AnyIssuer "SKY0409" Warning []
        "A rule without an issuer accepts tokens of any issuer that a key of its key set signed."
        "Set `issuer`."
    NoKeySet "SKY0410" Warning []
        "No key set is known for the rule, so all its tokens are refused."
        "Set `jwksUri` or `jwks`."
    InvalidKeySet "SKY0411" Error ["IST0106"]
        "The text is not a JSON Web Key Set."
        "Write the document of the issuer, with a list `keys`."
    InvalidSecret "SKY0412" Error []
        "A value of a Secret is not base64, or a key that the type requires is missing."
        "Encode the value, add the key, or use `stringData`."
    InvalidCertificate "SKY0413" Error []
        "The text has no certificate in PEM form that can be read."
        "Write the certificate as PEM, from `-----BEGIN CERTIFICATE-----` on."
    CertificateNotPem "SKY0414" Warning ["IST0161"]
        "Certificate or key of a Secret is not PEM, so gateways refuse it."
        "Write both as PEM."
    CertificateExpired "SKY0415" Error ["IST0161"]
        "The certificate of a Secret has expired, or is not valid yet."
        "Renew the certificate."
    CertificateExpiresSoon "SKY0416" Warning []
        "The certificate of a Secret expires within 14 days."
        "Renew the certificate."
    NoServerVerification "SKY0417" Warning []
        "TLS is originated, and the certificate of the server is not verified."
        "Remove `insecureSkipVerify`, and set `caCertificates` or `credentialName`."
    SystemRoots "SKY0418" Info ["IST0128", "IST0129"]
        "The rule originates TLS without a CA certificate, so the roots of the proxy's system verify the server."
        "Set `caCertificates` or `credentialName` if the server has a private root."
    NoClientVerification "SKY0419" Warning []
        "The server of a Gateway accepts clients whose certificate is not valid."
        "Remove `insecureSkipVerify`; mode `OPTIONAL_MUTUAL` accepts clients without a certificate."

    // Kubernetes objects and injection.
    PortProtocolTypo "SKY0501" Warning ["IST0118"]
        "The name of a port, or its `appProtocol`, is probably a misspelt protocol; the protocol is detected."
        "Correct the spelling."
    PortProtocolUnknown "SKY0502" Info ["IST0118"]
        "The name of a port declares no protocol, so the protocol of its connections is detected."
        "Name the port PROTOCOL or PROTOCOL-NAME, such as `http` or `grpc-api`, or set `appProtocol`."
    TemplateLabels "SKY0503" Error []
        "The labels of a pod template do not match the selector of its workload."
        "Use the same labels."
    UnknownVolume "SKY0504" Error []
        "The pod has no volume of this name."
        "Add the volume, or correct the name."
    InvalidImage "SKY0505" Warning []
        "The name of an image has a variable that no tool has replaced."
        "Replace the variable, for example with `envsubst`."
    ProbePort "SKY0506" Warning []
        "A probe names a port that the container does not have."
        "Name the port of the container, or use its number."
    ContainerPortConflict "SKY0507" Warning []
        "Two containers of a pod declare the same port."
        "Use different ports."
    InjectionLabelMisplaced "SKY0508" Warning ["IST0107"]
        "A label or annotation of injection on a workload has no effect."
        "Move it to the labels of the pod template."
    InjectionLabelValue "SKY0509" Warning ["IST0125"]
        "A label or annotation of injection has a value without meaning."
        "Use `enabled` or `disabled` on namespaces, `\"true\"` or `\"false\"` on pods."
    UnknownAnnotation "SKY0510" Warning ["IST0108"]
        "The mesh has no label or annotation of this name."
        "Correct the spelling."
    InjectionLabels "SKY0511" Warning ["IST0123"]
        "A namespace has two labels that decide about injection."
        "Keep `istio-injection` or `istio.io/rev`."
    ExternalNamePort "SKY0512" Warning ["IST0150"]
        "A port of an ExternalName Service is TCP, or its protocol is not declared."
        "Name the port after HTTP, HTTPS or TLS, which name the host."
    OtherMesh "SKY0513" Warning []
        "An annotation or label is read by Linkerd or Open Service Mesh only."
        "Use the counterpart that the finding names, or remove it."
    DeprecatedAnnotation "SKY0514" Warning ["IST0135"]
        "Istio's reference calls the annotation deprecated."
        "Use the replacement that the finding names, or remove it."
    ReservedUser "SKY0515" Warning ["IST0144"]
        "A container runs as the user of the sidecar, whose connections are not intercepted."
        "Use another user id than 1337."
    AutoImageNotInjected "SKY0516" Error ["IST0146", "IST0147"]
        "A container has the image `auto`, and injection, which replaces it, is disabled for the pod."
        "Remove the label or annotation that disables injection, or name an image."
    MisplacedAnnotation "SKY0517" Warning ["IST0107"]
        "The annotation has no effect on objects of this kind."
        "Move it to an object of a kind that the finding names."

    // References between objects.
    UnknownHost "SKY0601" Error ["IST0101"]
        "A route leads to a host that no Service and no ServiceEntry defines: requests get 503."
        "Correct the name, or add the Service or the ServiceEntry."
    HostNotChecked "SKY0602" Warning ["IST0101"]
        "A route leads to a host that is not among the files, which have no Services."
        "Analyze the rules together with the Services."
    UnknownSubset "SKY0603" Error ["IST0101"]
        "No DestinationRule defines the subset: requests get 503."
        "Correct the name, or add the subset to the DestinationRule of the host."
    UnknownDestinationPort "SKY0604" Error ["IST0101"]
        "The Service has no such port: requests get 503."
        "Use a port of the Service."
    HostWithoutService "SKY0605" Warning ["IST0101", "IST0174"]
        "A rule is for a Service that does not exist, so it has no effect."
        "Correct the name and the namespace of the host."
    UnknownGateway "SKY0606" Warning ["IST0101"]
        "A VirtualService is bound to a Gateway that does not exist."
        "Add the Gateway, or write NAMESPACE/NAME."
    HostNotInGateway "SKY0607" Warning ["IST0132"]
        "No server of the Gateway has the hosts of the VirtualService."
        "Add the hosts to a server, or correct them."
    UnknownSecret "SKY0608" Warning ["IST0101", "IST0161"]
        "The Secret of a gateway does not exist beside its pods, or has no certificate and key."
        "Add the Secret in the namespace of the gateway's pods, with `tls.crt` and `tls.key`."
    UnknownProvider "SKY0609" Warning ["IST0101", "IST0157"]
        "The mesh configuration has no extension provider of this name and kind, or no service of its address, or a \
         setting needs one and names none."
        "Add it to `extensionProviders`, or correct the name."
    NoSuchAccount "SKY0610" Warning ["IST0101"]
        "A policy names a service account that does not exist."
        "Correct the name and the namespace."
    NoSuchNamespace "SKY0611" Warning ["IST0101"]
        "A policy names a namespace without a workload."
        "Correct the name."
    UnknownTrustDomain "SKY0612" Warning []
        "No peer of the trust domain is accepted."
        "Correct the name, or add it to `trustDomainAliases`."
    SelectsNothing "SKY0613" Warning ["IST0101", "IST0127"]
        "No workload has the labels of the selector."
        "Correct labels and namespace."
    SubsetSelectsNothing "SKY0614" Warning ["IST0173"]
        "No pod of the host has the labels of the subset: requests to it get 503."
        "Correct the labels of the subset or of the pods."
    UnknownPortOfService "SKY0615" Warning []
        "Settings or matches are for a port that the Service does not have."
        "Use a port of the Service."
    PolicyServicePort "SKY0616" Warning []
        "A policy names a port of the Service; policies match ports of the workload."
        "Write the workload's port."
    UnknownTargetPort "SKY0617" Error []
        "No container has a port of the name in `targetPort`, so the Service has no endpoints."
        "Name the container's port, or use its number."
    UndeclaredTargetPort "SKY0618" Warning []
        "No container declares the port in `targetPort`."
        "Use a port that a container declares."
    UnknownServiceAccount "SKY0619" Warning []
        "A workload uses a ServiceAccount that does not exist, so a cluster starts no pod."
        "Add the ServiceAccount, or correct the name."
    NoTokens "SKY0620" Warning []
        "A policy matches claims of tokens, and no RequestAuthentication verifies tokens."
        "Add a RequestAuthentication for the workloads."
    UnknownDelegate "SKY0621" Error ["IST0101"]
        "The delegate of a rule does not exist, has hosts, or is not exported to its root."
        "Correct the name, the hosts or `exportTo` of the delegate."
    UnusedDelegate "SKY0622" Warning []
        "A VirtualService has no hosts, and none delegates to it."
        "Add hosts, or name it in a `delegate`."
    DelegateMatch "SKY0623" Warning []
        "The match of a delegate does not refine the match of its root."
        "Match a part of what the root matches."
    ShortHost "SKY0624" Warning []
        "A host has dots and is not a full name: only names without dots are completed."
        "Write the full name."
    NoClientWithLabels "SKY0625" Warning []
        "No workload has the labels of `sourceLabels`, so the rule never matches."
        "Correct the labels."
    ClaimsWithoutTokens "SKY0626" Error ["IST0149"]
        "A rule matches claims of tokens at a gateway where no RequestAuthentication verifies tokens."
        "Add a RequestAuthentication for the pods of the gateway."
    GatewayPortNotOnService "SKY0627" Warning ["IST0162"]
        "No Service of the gateway's pods has the port of the server."
        "Add the port to the Service."
    ReferenceWithoutGrant "SKY0628" Error []
        "A reference leads to another namespace, and no ReferenceGrant there allows it."
        "Add a ReferenceGrant in the namespace of the object, or move the object."
    UnresolvedReference "SKY0629" Error ["IST0101"]
        "A route of Gateway API refers to an object that does not exist or cannot be used."
        "Correct kind, name and namespace, or add the object."
    RouteNotAccepted "SKY0630" Error ["IST0101"]
        "No listener accepts the route: its parent, hostname or namespace does not fit."
        "Compare the route with `listeners` and `allowedRoutes` of the Gateway."
    ListenerNotServed "SKY0631" Error ["IST0101", "IST0161"]
        "A listener of a Gateway is not served."
        "Correct the certificate or the setting that the finding names."
    HiddenHost "SKY0632" Error ["IST0101"]
        "A route leads to a Service that is not exported to the namespace of the rule."
        "Add the namespace to `exportTo` of the Service or ServiceEntry."
    NoSuchExportNamespace "SKY0633" Warning []
        "`exportTo` names a namespace without a workload."
        "Correct the name of the namespace."
    SidecarHostNotFound "SKY0634" Warning ["IST0101"]
        "A host of a Sidecar's egress listener matches no service."
        "Correct namespace and name of the host."
    JwtOnTcpPort "SKY0635" Warning ["IST0119"]
        "A RequestAuthentication applies to a workload whose Service has a port that is not HTTP."
        "Name the port `http` or `http-...`."
    HttpRuleOnTcp "SKY0636" Warning []
        "A policy uses attributes or an authorizer of HTTP, and a port of its workloads is not HTTP."
        "Use ports and identities only, or name the port after its protocol."
    PolicyTargetMissing "SKY0637" Warning []
        "A RateLimitPolicy targets an object, or a rule of a route, that does not exist."
        "Correct the name. Targets are in the namespace of the policy."

    // Conflicts between objects.
    HostConflict "SKY0701" Error ["IST0109"]
        "Another VirtualService routes the host, and takes precedence."
        "Merge the rules into one VirtualService."
    EntryConflict "SKY0702" Error []
        "An older ServiceEntry defines the host with another resolution, location or selector."
        "Use the same settings, or remove one of the entries."
    AddressConflict "SKY0703" Error []
        "Two Services have the same address."
        "Use a different address for each Service."
    PolicyConflict "SKY0704" Error []
        "An older PeerAuthentication applies to the same workloads."
        "Remove one of them."
    RootSelector "SKY0705" Error []
        "A PeerAuthentication of the root namespace cannot select workloads."
        "Remove the selector, or move the policy into the namespace of the workload."
    TlsMismatch "SKY0706" Error ["IST0113"]
        "DestinationRule and PeerAuthentication disagree about mutual TLS: every request fails."
        "Use ISTIO_MUTUAL, or change the mode of the PeerAuthentication."
    NoHttpPort "SKY0707" Error []
        "HTTP rules are for a Service without an HTTP port."
        "Name the port `http` or `http-...`, or set `appProtocol`."
    NoTcpPort "SKY0708" Warning []
        "Rules for TCP or TLS are for a Service without such a port."
        "Name the port after its protocol."
    AddresslessPort "SKY0709" Warning ["IST0134"]
        "Only the port distinguishes the connections of a TCP port without an address."
        "Set an address."
    AddresslessConflict "SKY0710" Warning []
        "A TCP port without an address is the HTTP port of another Service."
        "Set `clusterIP`, or use another port."
    DryRunWithoutEffect "SKY0711" Warning []
        "Only policies with action ALLOW or DENY can be dry runs."
        "Remove the annotation."
    DryRunValue "SKY0712" Warning ["IST0125"]
        "The annotation for dry runs is not a boolean, so the policy is enforced."
        "Write `\"true\"` or `\"false\"`."
    SidecarConflict "SKY0713" Error ["IST0110"]
        "Two Sidecars of a namespace select the same workload."
        "Change one of the selectors."
    SidecarWithoutSelector "SKY0714" Error ["IST0111"]
        "A namespace has two Sidecars without a selector."
        "Remove one of them, or add a selector."
    TelemetryConflict "SKY0715" Error ["IST0159"]
        "Two Telemetries of a namespace select the same workload."
        "Merge them, or change one of the selectors."
    TelemetryWithoutSelector "SKY0716" Error ["IST0160"]
        "A namespace has two Telemetries without a selector."
        "Merge them, or add a selector."
    GatewayConflict "SKY0717" Error ["IST0145"]
        "Two Gateways serve the same host at the same port of the same pods."
        "Remove the host from one of them."
    SharedCertificate "SKY0718" Warning ["IST0138"]
        "Two Gateways of the same pods use one certificate: clients that reuse connections may get 404."
        "Use one Gateway with all hosts, or a certificate for each."
    DestinationRuleConflict "SKY0719" Warning []
        "An older DestinationRule has the same host; its settings take precedence."
        "Merge the rules into one DestinationRule."
    PodPortProtocols "SKY0720" Warning ["IST0116"]
        "Two Services of a workload use one port with different protocols."
        "Use the same protocol, or different ports."
    PodTargetPorts "SKY0721" Warning ["IST0137"]
        "Two Services of a workload lead different ports to one port of the container."
        "Use the same port in both Services."
    DestinationPortRequired "SKY0722" Info ["IST0112"]
        "A route without a port leads to a Service with several ports; the port of the request is used."
        "Set `destination.port.number`."
    EntryAddressConflict "SKY0723" Warning []
        "Two ServiceEntries share an address and a TCP port, so connections go to the older one."
        "Use different addresses or ports."
    SameRateLimit "SKY0724" Warning []
        "Two RateLimitPolicies limit the same requests; the lower limit decides."
        "Remove one of the rules."
    EntryProtocolConflict "SKY0725" Warning ["IST0177"]
        "Two ServiceEntries define a port of one host with different protocols."
        "Use the same protocol in both."
    SubsetNotAtGateway "SKY0726" Info ["IST0140"]
        "A gateway sends requests to a service without a subset, although a rule of the mesh has subsets for it."
        "Name subsets in the rule of the gateway too if they are to apply there."
    SharedHost "SKY0727" Info ["IST0109"]
        "Another VirtualService has the same host. Where both are visible, only one of them takes effect."
        "Merge the rules into one VirtualService."
    ComparisonLimit "SKY0728" Warning []
        "There are too many objects to compare each with each, so some findings may be missing."
        "Analyze fewer namespaces at once."

    // Support.
    UnsupportedField "SKY0801" Warning ["IST0133"]
        "The mesh does not support the field; the object takes effect without it."
        "Remove the field if its effect is needed nowhere."
    Unsupported "SKY0802" Error []
        "The mesh does not support the value, so the object is refused."
        "Use another value."
    UnsupportedSetting "SKY0803" Warning []
        "The mesh does not support this setting of the mesh configuration."
        "Remove the setting."
    PluginNotRun "SKY0804" Error []
        "A Wasm plugin or a script beyond the limits decides which requests pass, and is not run: the requests are refused."
        "Use an external authorizer, a RequestAuthentication or few scripts instead, or set `failStrategy: FAIL_OPEN`."
    CannotRun "SKY0901" Error []
        "`skysail up` cannot run the workload."
        "Change the part of the workload that the finding names."
    NotRun "SKY0902" Warning []
        "`skysail up` does not run the workload."
        "Follow the remedy of the finding."
}
