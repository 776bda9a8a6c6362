package io.persistshard.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.stream.StreamSupport;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Changelog;
import org.apache.spark.sql.connector.catalog.ChangelogContext;
import org.apache.spark.sql.connector.catalog.ChangelogRange;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableInfo;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Shards as tables of Spark's SQL, by the names of the registry: NAMESPACE.NAME, or OPERATOR.NAMESPACE.NAME. It knows Spark's interfaces
 * but nothing about persist: each call sends a request to the process behind the catalog.
 *
 * <p>Options, as spark.sql.catalog.NAME.OPTION: blob and consensus (the stores, without credentials); namespace (the default namespace).
 */
public final class PersistCatalog implements StagingTableCatalog, SupportsNamespaces {
  private static final Set<String> STORES = Set.of("blob", "consensus");
  private static final String NAMESPACE = "namespace";

  private String name;
  private Map<String, String> stores;
  private String[] defaultNamespace;

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.stores = new HashMap<>();
    for (Map.Entry<String, String> option : new TreeMap<>(options).entrySet()) {
      String key = option.getKey();
      if (STORES.contains(key)) stores.put(key, withoutCredentials(key, option.getValue()));
      else if (!key.equals(NAMESPACE)) throw new IllegalArgumentException(setting(key) + ": a catalog has the options blob, consensus, namespace");
    }
    for (String key : STORES)
      if (!stores.containsKey(key)) throw new IllegalArgumentException(setting(key) + " is not set: it names a store of the catalog's shards");
    this.defaultNamespace = options.getOrDefault(NAMESPACE, "default").split("\\.");
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public String[] defaultNamespace() {
    return defaultNamespace;
  }

  @Override
  public Table loadTable(Identifier ident) throws NoSuchTableException {
    return load(ident, Desk.JSON.createObjectNode());
  }

  /** VERSION AS OF: a time of the shard, in the form of option as_of of format persist. */
  @Override
  public Table loadTable(Identifier ident, String version) throws NoSuchTableException {
    return load(ident, Desk.JSON.createObjectNode().put("version", version));
  }

  @Override
  public Table loadTable(Identifier ident, long micros) throws NoSuchTableException {
    return load(ident, Desk.JSON.createObjectNode().put("timestamp_us", micros));
  }

  private PersistTable load(Identifier ident, ObjectNode request) throws NoSuchTableException {
    String fixed = request.isEmpty() ? null : "AS OF a time";
    Frame frame = new Frame(desk());
    JsonNode loaded = frame.desk.ask("load", named(request, ident).put("frame", frame.name));
    if (loaded.isNull()) throw new NoSuchTableException(ident);
    return new PersistTable(shown(ident), frame, loaded, loaded.path("is_metadata").asBoolean() ? "is metadata and" : fixed);
  }

  /** CHANGES FROM ... TO ..., by VERSION or TIMESTAMP. Without a start, only a stream can read the changes. */
  @Override
  public Changelog loadChangelog(Identifier ident, ChangelogContext context, CaseInsensitiveStringMap options)
      throws NoSuchTableException {
    ChangelogRange range = context.range();
    ObjectNode request = named(Desk.JSON.createObjectNode(), ident);
    if (range instanceof ChangelogRange.VersionRange versions) {
      request.put("start", versions.startingVersion()).put("end", versions.endingVersion().orElse(null)).put("unit", "version");
    } else if (range instanceof ChangelogRange.TimestampRange times) {
      request.put("start", Long.toString(times.startingTimestamp())).put("unit", "us");
      request.put("end", times.endingTimestamp().map(Object::toString).orElse(null));
    }
    if (!(range instanceof ChangelogRange.UnboundedRange))
      request.put("with_start", range.startingBoundInclusive()).put("with_end", range.endingBoundInclusive());
    Frame frame = new Frame(desk());
    JsonNode loaded = frame.desk.ask("changes", request.put("frame", frame.name));
    if (loaded.isNull()) throw new NoSuchTableException(ident);
    return new PersistChanges(shown(ident), frame, loaded);
  }

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    ObjectNode request = Desk.JSON.createObjectNode();
    addAll(request.putArray("namespace"), namespace);
    JsonNode found = desk().ask("tables", request);
    if (found.isNull() && Arrays.equals(namespace, defaultNamespace)) return new Identifier[0];
    if (found.isNull()) throw new NoSuchNamespaceException(namespace);
    return texts(found).map(table -> Identifier.of(namespace, table)).toArray(Identifier[]::new);
  }

  @Override
  public String[][] listNamespaces() {
    return texts(desk().ask("namespaces", Desk.JSON.createObjectNode())).map(each -> new String[] {each}).toArray(String[][]::new);
  }

  /** Namespaces are not nested. The default namespace always exists. */
  @Override
  public String[][] listNamespaces(String[] namespace) throws NoSuchNamespaceException {
    if (namespace.length == 0) return listNamespaces();
    loadNamespaceMetadata(namespace);
    return new String[0][];
  }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace) throws NoSuchNamespaceException {
    listTables(namespace);
    return Map.of();
  }

  /** Does not load the table, because a load takes a lease. */
  @Override
  public boolean tableExists(Identifier ident) {
    return desk().ask("exists", named(Desk.JSON.createObjectNode(), ident)).asBoolean();
  }

  @Override
  public PersistTable createTable(Identifier ident, TableInfo info) throws TableAlreadyExistsException {
    if (info.partitions().length > 0) throw refusal("PARTITIONED BY", "a shard is sorted by its key");
    ObjectNode request = named(Desk.JSON.createObjectNode(), ident);
    try {
      request.set("columns", Desk.JSON.readTree(info.schema().json()));
    } catch (JsonProcessingException error) {
      throw new IllegalStateException(error);
    }
    ObjectNode properties = request.putObject("properties");
    info.properties().forEach(properties::put);
    if (!desk().ask("create", request).asBoolean()) throw new TableAlreadyExistsException(ident);
    try {
      return load(ident, Desk.JSON.createObjectNode());
    } catch (NoSuchTableException error) {
      throw new IllegalStateException(ident + " was dropped while it was created", error);
    }
  }

  /** CREATE TABLE AS: the table exists at once, and is removed when its query fails. */
  @Override
  public StagedTable stageCreate(Identifier ident, TableInfo info) throws TableAlreadyExistsException {
    return new PersistTableOfQuery(createTable(ident, info), () -> dropTable(ident));
  }

  /** Refuses if the table exists. For a catalog without staging, Spark would drop the table before it gets the refusal. */
  @Override
  public StagedTable stageCreateOrReplace(Identifier ident, TableInfo info) {
    try {
      return stageCreate(ident, info);
    } catch (TableAlreadyExistsException error) {
      throw refusal("REPLACE TABLE", shown(ident) + " keeps its rows; new rows in their place are INSERT OVERWRITE, or in Python "
          + "df.writeTo(name).overwrite(lit(True)), and for other columns DROP TABLE comes first");
    }
  }

  @Override
  public StagedTable stageReplace(Identifier ident, TableInfo info) {
    return stageCreateOrReplace(ident, info);
  }

  @Override
  public boolean dropTable(Identifier ident) {
    return desk().ask("drop", named(Desk.JSON.createObjectNode(), ident)).asBoolean();
  }

  /** New columns at the end of the value, and wider numbers in it. The process behind the catalog decides whether they fit. */
  @Override
  public Table alterTable(Identifier ident, TableChange... changes) throws NoSuchTableException {
    ObjectNode request = named(Desk.JSON.createObjectNode(), ident);
    ArrayNode wanted = request.putArray("changes");
    for (TableChange change : changes) {
      ObjectNode one = wanted.addObject();
      if (change instanceof TableChange.AddColumn add) {
        if (add.position() != null) throw refusal("FIRST and AFTER", "a new column stands at the end of the value");
        if (add.comment() != null) throw refusal("COMMENT", "a shard holds none");
        if (add.defaultValue() != null) throw refusal("DEFAULT", "a new column is null in the rows that are there");
        typed(one, add.dataType()).put("nullable", add.isNullable());
        addAll(one.putArray("add"), add.fieldNames());
      } else if (change instanceof TableChange.UpdateColumnType wider) {
        typed(one, wider.newDataType());
        addAll(one.putArray("widen"), wider.fieldNames());
      } else {
        throw refusal("ALTER TABLE with " + change.getClass().getSimpleName(),
            "a table gains columns (ADD COLUMNS) and wider numbers (ALTER COLUMN ... TYPE), and nothing else of it changes");
      }
    }
    if (!desk().ask("alter", request).asBoolean()) throw new NoSuchTableException(ident);
    return loadTable(ident);
  }

  @Override
  public void renameTable(Identifier from, Identifier to) {
    throw refusal("ALTER TABLE RENAME", "a shard keeps the name of its owner");
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> metadata) {
    throw refusal("CREATE NAMESPACE", "a namespace is there as long as it has tables");
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes) {
    throw refusal("ALTER NAMESPACE", "a namespace has no properties");
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade) {
    throw refusal("DROP NAMESPACE", "a namespace goes with its last table");
  }

  private Desk desk() {
    return Desk.at(name, stores);
  }

  private UnsupportedOperationException refusal(String statement, String remedy) {
    return new UnsupportedOperationException("catalog " + name + " does not do " + statement + ": " + remedy);
  }

  /** Spark writes its settings into event logs and its user interface, so a setting must not be a secret. */
  private String withoutCredentials(String key, String url) {
    if (url.contains("@") || url.toLowerCase(java.util.Locale.ROOT).matches(".*[?&](password|secret\\w*|token|access_?key\\w*)=.*"))
      throw new IllegalArgumentException(setting(key) + " has credentials, which Spark would show: give a file with "
          + "?password_file=PATH, or the variables of the environment that the store's client reads");
    return url;
  }

  private static ObjectNode typed(ObjectNode change, DataType type) {
    return change.put("type", type.json());
  }

  private String shown(Identifier ident) {
    return name + "." + String.join(".", ident.namespace()) + "." + ident.name();
  }

  private String setting(String key) {
    return "spark.sql.catalog." + name + "." + key;
  }

  private static ObjectNode named(ObjectNode request, Identifier ident) {
    ArrayNode path = request.putArray("table");
    addAll(path, ident.namespace());
    path.add(ident.name());
    return request;
  }

  private static void addAll(ArrayNode to, String[] texts) {
    for (String text : texts) to.add(text);
  }

  private static java.util.stream.Stream<String> texts(JsonNode array) {
    return StreamSupport.stream(array.spliterator(), false).map(JsonNode::asText);
  }
}
