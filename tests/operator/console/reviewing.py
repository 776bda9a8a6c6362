"""The API server of the operator's tests with what the console requests besides: rights, tokens, reviews and merge patches."""

from api_server import ApiServer
from persist_operator.cluster.port import ApiError

REVIEWS = {
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    "/apis/authorization.k8s.io/v1/subjectaccessreviews",
    "/apis/authentication.k8s.io/v1/tokenreviews",
}
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ReviewingServer(ApiServer):
    """`tokens` leads from a token to its user. `rights` are (user, verb, resource, namespace); None stands for any of its place.

    Requests that are no reviews are admitted by the rights of their token's user.
    """

    def __init__(self):
        self.tokens = {"the-token": "me"}
        self.rights = {("me", None, None, None)}
        self.is_broken = False
        self.current = None
        super().__init__()

    def holds(self, user, verb, resource, namespace):
        asked = (user, verb, resource, namespace or "")
        return any(all(has in {None, is_} for has, is_ in zip(right, asked, strict=True)) for right in self.rights)

    def answer(self, method, path, query, body):
        if self.is_broken:
            return 500, {"message": "the server has no answer"}
        user = self.user_of_request()
        if user is None:
            return 401, {"message": "Unauthorized"}
        if path in REVIEWS:
            return 201, {**body, "status": self.review(user, body)}
        kind, namespace, rest = self.parse(path)
        resource = kind.plural + (f"/{rest[1]}" if rest[1:] else "")
        verb = VERBS.get(method) or ("get" if rest else "list")
        if not self.holds(user, verb, resource, namespace):
            return 403, {"message": f"{resource} is forbidden: User {user!r} cannot {verb} resource {resource!r}"}
        if method == "PATCH" and len(rest) == 1:
            changed = body["metadata"]["annotations"]
            self.cluster.edit(
                kind, namespace, rest[0], lambda one: one["metadata"].setdefault("annotations", {}).update(changed)
            )
            return 200, self.cluster.get(kind, namespace, rest[0])
        try:
            return super().answer(method, path, query, body)
        except ApiError as error:
            return error.status, {"message": str(error)}

    def user_of_request(self):
        """The user of the newest request: tests send one at a time."""
        headers = {name.lower(): value for name, value in self.requests[-1][3].items()}
        return self.tokens.get(headers.get("authorization", "").removeprefix("Bearer "))

    def review(self, user, body):
        spec = body["spec"]
        if body["kind"] == "TokenReview":
            found = self.tokens.get(spec["token"])
            return (
                {"authenticated": False}
                if found is None
                else {"authenticated": True, "user": {"username": found, "groups": ["g"]}}
            )
        asked = spec["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        return {"allowed": self.holds(spec.get("user", user), asked["verb"], resource, asked.get("namespace"))}

    def sent(self, method):
        """The paths of requests by this method."""
        return [path for verb, path, _, _ in self.requests if verb == method]
